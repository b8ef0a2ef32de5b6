"""Weights of other systems in and out: Hugging Face folders to checkpoints and back, with a
certificate.
"""
