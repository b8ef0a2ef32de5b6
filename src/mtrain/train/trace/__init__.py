"""One step of one rank as data: every operation, tensor and byte of it."""
