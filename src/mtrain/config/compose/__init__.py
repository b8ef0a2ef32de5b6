"""Composition of a command line and YAML files into one validated configuration."""
