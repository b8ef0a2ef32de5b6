"""Layer 2: which rank does what. Pure Python, no torch."""
