"""8-bit and 4-bit weights: how they are chosen, and how much quality they cost."""
