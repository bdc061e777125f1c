"""Everything that must be checked and measured on a GPU."""
