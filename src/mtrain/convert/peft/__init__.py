"""Low-rank adapters in the format of `peft`."""
