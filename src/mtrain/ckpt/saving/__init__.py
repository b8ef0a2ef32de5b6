"""Checkpoints that a separate process of each rank writes while training goes on."""
