"""A finished or running run, read from its folder: its curves, its end, and what differs between
two runs.
"""
