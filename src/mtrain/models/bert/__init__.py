"""BERT: an encoder that predicts masked tokens and whether one sentence follows another."""
