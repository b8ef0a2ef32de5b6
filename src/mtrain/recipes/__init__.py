"""Layer 2: what people send each other: shared recipes, locks, and the command lines and files of
other systems.
"""
