"""The sampling kernel on the CPU: is it right, and what does it cost."""

from .suite import SUITE as SUITE

main = SUITE.main
