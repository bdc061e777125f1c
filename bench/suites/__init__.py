"""The benchmarks, built on `bench.core`: workloads, measurements and tables."""
