"""Layer 10: assembly of a run, its loop and hooks, and what else a trained model is used for."""
