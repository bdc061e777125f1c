"""The sampling kernel on the CPU: correctness, cost, and output distribution."""
