"""Layer 8: from a configuration to this rank's model, optimizer and schedule."""
