"""AdamW over many tensors at once, gradient norm and clipping, and the
orthogonalisation of Muon.
"""
