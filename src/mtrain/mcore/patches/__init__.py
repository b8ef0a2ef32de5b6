"""Defects of megatron-core: patches of those that users reach, and a table of known bugs."""
