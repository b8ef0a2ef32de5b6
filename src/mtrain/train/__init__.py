"""Floor 8: where the parts meet and a run happens."""
