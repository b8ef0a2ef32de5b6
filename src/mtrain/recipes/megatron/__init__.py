"""Megatron-LM's command lines and YAML files as a configuration, and a configuration as flags."""
