"""A second graph for ONNX Runtime on the CPU, with our own operators and the same weights."""
