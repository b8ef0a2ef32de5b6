"""The subverbs of `data`: what happens to text before training."""
