"""Rows of tokens sorted by expert, and their weighted way back."""
