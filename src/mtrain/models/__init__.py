"""Families of models: how each is counted, shrunk and built."""
