"""Layer 2: the work of each rank, in pure Python."""
