"""All that a GPU can tell about this project."""

from .suite import main as main
