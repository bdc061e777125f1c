"""An HTML page about the speedup of speculative decoding on a bundle, and its causes."""
