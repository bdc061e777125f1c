"""The analyses of the kernel paper, done again with this kernel."""

from .suite import SUITE as SUITE

main = SUITE.main
