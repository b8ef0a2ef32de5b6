"""Tokenizers of all kinds behind one interface, and faster ways to encode with them."""
