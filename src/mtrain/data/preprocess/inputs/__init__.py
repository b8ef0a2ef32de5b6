"""Input files as documents: formats, units of work, records, tables, sentences."""
