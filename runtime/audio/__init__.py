"""Speech to text without the models: from a file to features, and from tokens to timed text."""
