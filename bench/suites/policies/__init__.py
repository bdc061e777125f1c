from .suite import SUITE, main

__all__ = ["SUITE", "main"]
