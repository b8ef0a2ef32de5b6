"""A run seen from its folder: the state of the run, and a frame of text that shows it."""
