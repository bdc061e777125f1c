"""The benchmarks, as declarations on `bench.core`: what is measured where, and what is told."""
