"""A page on what speculative decoding gains on a bundle, and why."""
