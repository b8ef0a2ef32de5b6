"""The subverbs of `checkpoint`: what a checkpoint holds, and whether a run can continue from it."""
