"""The formulas of Leviathan et al. 2023, and measurements to use them with."""
