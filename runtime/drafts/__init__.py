"""Who proposes tokens: one file for each family of drafts, and one registry (`registry.py`)."""
