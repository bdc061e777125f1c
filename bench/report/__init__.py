"""A page on what speculative decoding gains on a bundle, and why."""

from .page import main as main
