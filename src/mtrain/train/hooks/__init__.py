"""Everything that happens around steps, one hook per file."""
