"""The machine and its devices, as facts."""
