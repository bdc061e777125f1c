"""C++ and CUDA sources of the sampling kernel, the operators and the session, and build scripts."""
