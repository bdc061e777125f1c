"""A Hugging Face checkpoint pair becomes portable ONNX graphs, checked against the original."""
