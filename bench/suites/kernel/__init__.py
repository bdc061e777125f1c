"""The sampling kernel on the CPU: is it right, what does it cost, what do its rules emit."""
