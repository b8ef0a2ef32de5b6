"""Checkpoints in object stores: addresses, transfers, and the process that uploads a run's."""
