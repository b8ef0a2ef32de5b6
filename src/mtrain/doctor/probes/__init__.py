"""Programs that measure one thing and print it as JSON; `mtrain.doctor.probing` runs them.

They import little, so that each starts within a fraction of a second.
"""
