"""From a command line and YAML files to one validated configuration."""
