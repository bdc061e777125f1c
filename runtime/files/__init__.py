"""The file contract between the rooms, and what a failure looks like."""
