"""LLaVA-1.5: a language model that reads images by a CLIP vision transformer and a projector."""
