"""Quantisation to FP8, MXFP8 and NVFP4, alone and behind SwiGLU."""
