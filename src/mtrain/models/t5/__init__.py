"""T5: an encoder-decoder that fills in spans of a text."""
