"""Rollouts: answers that a policy samples, rewards of them, and the samples of a step."""
