"""Jobs of schedulers as text, one module for each launcher, and their submission."""
