"""Benchmarks: `python -m bench SUITE`. core: shared building blocks; systems: Outrider and peers on
the same checkpoints; suites: the benchmarks; report: an HTML page about one bundle."""
