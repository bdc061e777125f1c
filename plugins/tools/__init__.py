"""What compiles the kernel: for this CPU, for all GPUs, as a TensorRT plugin."""
