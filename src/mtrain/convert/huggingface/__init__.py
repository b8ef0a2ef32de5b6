"""Hugging Face folders: configuration, weights, tokenizer files, and transformers' logits."""
