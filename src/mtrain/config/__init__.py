"""Layer 1: what a run is.

Schemas, composition with the origin of every key, and the rules between keys.
"""
