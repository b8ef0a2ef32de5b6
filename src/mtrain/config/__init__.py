"""Layer 1: schemas, composition with the origin of every key, and the rules between keys."""
