"""Layer 10: the start of a run's ranks, their supervision, and the report of the first failure."""
