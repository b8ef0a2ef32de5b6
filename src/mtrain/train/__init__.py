"""Layer 9: where the parts meet and a run happens."""
