"""Layer 11: the command line, one file per verb."""
