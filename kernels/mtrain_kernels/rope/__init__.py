"""Rotary position embedding of queries and keys, with optional normalisation of each head."""
