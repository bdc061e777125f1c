"""Build a bundle (a backend's engines and `manifest.json`) from exported graphs."""
