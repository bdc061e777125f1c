"""Checkpoints that transcribe: the features that their encoder reads, and their special tokens."""
