"""Hugging Face's `config.json` as the shape of a model, and the shape as a `config.json`."""
