"""The subverbs of `recipe`. None of them imports torch."""
