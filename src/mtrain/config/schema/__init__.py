"""The sections of a configuration: one file per section of the YAML."""
