"""Beam search with a drafting beam."""
