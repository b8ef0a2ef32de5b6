"""Comparison of layouts: what two of them computed, and the first module in which they differ."""
