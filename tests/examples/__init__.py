"""Tests that run the directories under examples/."""
