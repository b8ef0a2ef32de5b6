"""The causes of the seconds of a run's life: measured by rank 0, logged, and added up."""
