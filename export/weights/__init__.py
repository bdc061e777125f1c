"""Weights of 8 and 4 bits, in blocks: NumPy, and nothing of graphs."""
