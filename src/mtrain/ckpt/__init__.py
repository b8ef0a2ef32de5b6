"""Layer 8: state on disk. No pickle is written or read; every byte is covered by a hash."""
