"""Comparison of layouts: their results, and the first module in which they differ."""
