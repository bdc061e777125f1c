"""Quantised checkpoint formats: weights are dequantised tensor by tensor, when they are needed."""
