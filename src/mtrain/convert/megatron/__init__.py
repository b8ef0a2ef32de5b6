"""Checkpoints of Megatron-LM in its format `torch_dist`: read, compared and written."""
