"""The verdict on a checkpoint: whether a run can continue from it, and what changes if it does."""
