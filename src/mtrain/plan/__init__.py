"""Layer 3: what a run will cost, computed without torch."""
