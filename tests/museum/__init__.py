"""Real silent bugs of the field, each brought back by a small change, for `prove` to find and to
name.
"""
