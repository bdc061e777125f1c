"""The file contract between `export`, `engines` and `runtime`, and the errors of all three."""
