"""The same model for ONNX Runtime on the CPU, with an attention of our own and the same weights."""
