"""Decoder-only transformers: dense or with experts, standard attention or MLA."""
