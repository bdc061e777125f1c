"""All that a GPU can tell about this project."""
