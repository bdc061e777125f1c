"""The sampling kernel: C++ and CUDA sources, and the script that compiles them."""
