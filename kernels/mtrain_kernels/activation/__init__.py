"""Gated and squared activations of a feed-forward layer, with an optional weight for each token."""
