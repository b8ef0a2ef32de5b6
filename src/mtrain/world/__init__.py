"""Layer 6: this process among the others: process groups equal to the rank grid, or a refusal."""
