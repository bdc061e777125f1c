"""The analyses of the kernel paper, done again with this kernel."""
