"""Quantisation to FP8, MXFP8 and NVFP4, by itself and after SwiGLU."""
