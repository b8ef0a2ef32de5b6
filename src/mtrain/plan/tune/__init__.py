"""The search for a layout: what may be chosen, what a choice costs at least, and the
best of them.
"""
