"""Depthwise causal convolution over time, with SiLU."""
