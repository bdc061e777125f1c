"""Scripts that compile the kernel: for this CPU, for all GPUs, and as a TensorRT plugin."""
