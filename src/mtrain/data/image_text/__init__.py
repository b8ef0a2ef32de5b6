"""Texts with images: records, decoded images, and their samples."""
