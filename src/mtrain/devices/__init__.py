"""Devices as plug-ins: the interface of a kind of accelerator, and the registry of names."""
