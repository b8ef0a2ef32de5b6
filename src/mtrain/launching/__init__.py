"""Layer 10: starting the ranks of a run, watching them, and saying which one failed."""
