"""Speech to text, but for the models: from a file to features, and from tokens to timed text."""
