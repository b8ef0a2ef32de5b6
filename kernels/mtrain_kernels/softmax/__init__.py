"""Softmax of attention scores: causal or masked, scaled, with a sink per head."""
