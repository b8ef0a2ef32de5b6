"""Softmax attention with grouped queries, masks by position, sinks."""
