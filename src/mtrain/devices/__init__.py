"""Devices as plug-ins: what a kind of accelerator is, and where to find one by name."""
