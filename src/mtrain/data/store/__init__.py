"""Corpora on disk: token files and their index, remote stores, the cache of prepared data."""
