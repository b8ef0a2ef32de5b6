"""Statistics of whole tensors, from the parts that ranks have."""
