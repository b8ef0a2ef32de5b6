"""Linear layers whose three products multiply in FP8."""
