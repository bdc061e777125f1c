"""Model-local functions in the graphs of all backends, whose bodies are standard operators."""
