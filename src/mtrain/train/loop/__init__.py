"""The loop: prefetching samples, one optimizer step, and the trainer that repeats it."""
