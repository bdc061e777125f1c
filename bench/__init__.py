"""What decoding costs, as ratios measured in one run: `python -m bench.decode`."""
