"""Preprocessing: documents of many formats become `.bin/.idx` with a manifest, and can be viewed.

`inputs` finds and reads the documents, `encoders` makes token ids, `work` is the job of one
process, `journal` resumes a killed run, and `build` joins the parts to a corpus.
"""
