"""The event stream of a run: JSON lines in the folder `events/` of the run folder.

Each attempt of a run has a file, `0001.jsonl` for the first one, which is only ever appended to.
`docs/reference/files.md` lists the kinds of events. A reader ignores kinds and keys that it does
not know, so new ones need no new format.
"""
