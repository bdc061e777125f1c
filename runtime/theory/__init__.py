"""The paper's formulas."""
