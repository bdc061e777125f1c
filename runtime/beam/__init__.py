"""Beam search, drafted by a beam of the draft model."""
