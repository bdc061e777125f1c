"""Outrider and what a user would pick instead, side by side."""
