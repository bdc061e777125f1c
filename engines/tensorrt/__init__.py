"""TensorRT and TensorRT-RTX: two libraries with one interface, and the builder for both."""
