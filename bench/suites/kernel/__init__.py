"""The sampling kernel on the CPU: is it right, and what does it cost."""
