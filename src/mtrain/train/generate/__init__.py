"""Text, scores and validation losses from the model of a checkpoint."""
