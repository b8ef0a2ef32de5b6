"""What becomes of text before training: documents of many formats to `.bin/.idx` with a manifest,
and back to view.

`sources` and `units` say what is read in which order, `record` what of it is text, `encoders` what
makes ids, `work` what one process does, `journal` how a killed run goes on, `build` how the parts
become a corpus.
"""
