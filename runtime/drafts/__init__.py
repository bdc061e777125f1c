"""Sources of draft tokens: a file for each family of drafts, and a registry (`registry.py`)."""
