"""Recipes, locks, and the command lines and files of other systems, imported and exported."""
