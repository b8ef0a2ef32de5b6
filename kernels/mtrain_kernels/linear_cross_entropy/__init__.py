"""A linear layer and the cross entropy over its output, which is never held whole."""
