"""A round as CUDA graphs."""
