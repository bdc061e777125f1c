"""Export Hugging Face checkpoint pairs to portable graphs, checked against the original models."""
