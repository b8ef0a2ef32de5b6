"""Hybrids: decoders of Mamba-2 layers, attention, MLPs and experts, in the order of a pattern."""
