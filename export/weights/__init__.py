"""Weights of few bits: blocks of levels with a scale, from the checkpoint to the graph."""
