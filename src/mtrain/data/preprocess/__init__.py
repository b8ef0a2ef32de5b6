"""Preprocessing: documents of many formats become `.bin/.idx` with a manifest, and can be viewed.

`sources` finds the files, `readers` and `record` read documents from them, `encoder` and
`tokenizers` make token ids, `workers` has the processes, `journal` resumes a killed run, and
`build` joins the parts to a corpus.
"""
