"""Layer 3: the cost of a run, computed without torch."""
