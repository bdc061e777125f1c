"""Measurement: `python -m bench SUITE`. core: each concept once; systems: decoders on the same
checkpoints; suites: what is measured where; report: a page on one bundle."""
