"""Copies of a machine's local checkpoints on other machines of its run."""
