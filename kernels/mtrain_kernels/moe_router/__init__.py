"""Routing: the experts of each token, and their weights."""
