"""Rounds as CUDA graphs."""
