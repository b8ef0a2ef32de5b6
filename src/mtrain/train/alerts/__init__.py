"""Alerts: detectors that read the numbers of a run, and the webhook that they are sent to."""
