"""Graphs become a bundle: a backend's engines and `manifest.json`."""
