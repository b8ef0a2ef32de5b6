"""Linear layers of experts whose three products multiply in FP8."""
