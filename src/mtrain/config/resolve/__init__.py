"""Values that follow from others: defaults, batches, stages and the machine's."""
