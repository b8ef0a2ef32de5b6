"""The scan of Mamba-2 (state space duality)."""
