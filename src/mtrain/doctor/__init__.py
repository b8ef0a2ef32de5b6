"""The examination of a machine before a run: facts gathered once, and pure checks of them."""
