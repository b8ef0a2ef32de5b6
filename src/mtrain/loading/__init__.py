"""The way from a command line to a configuration that may run, and from a run to its checkpoint."""
