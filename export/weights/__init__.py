"""Weights of 8 and 4 bits: how they are chosen, and what they cost in quality."""
