"""Checkpoints that transcribe: what their encoder reads, and which tokens are of which meaning."""
