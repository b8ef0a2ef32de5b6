"""Weights, optimizers and their state: which rank holds which part, and how it is updated."""
