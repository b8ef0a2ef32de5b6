"""Values that follow from other values: defaults, batches, stages and the facts of the machine."""
