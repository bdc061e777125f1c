"""Benchmark of the policies that choose gamma for each round."""
