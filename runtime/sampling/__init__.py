"""Logits to distributions, verification rules, random numbers."""
