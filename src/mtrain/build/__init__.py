"""Floor 7: from a configuration to this rank's model, optimizer and schedule."""
