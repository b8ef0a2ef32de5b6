"""Samples of tokens by number: order, blends, packing, whole documents, synthetic tokens."""
