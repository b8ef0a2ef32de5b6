"""The family ngram: a decoder-only transformer that also looks up its last tokens together.

Source: Huang et al. 2025, arXiv:2501.16975 (over-encoding), with one table for each length.
"""
