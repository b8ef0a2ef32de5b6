"""Layers that megatron-core builds its models of, and the specs that name them."""
