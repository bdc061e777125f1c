"""Sampling: distributions from logits, verification rules, random numbers."""
