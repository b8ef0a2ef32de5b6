"""Plain text: files to read, tokenizers, and the tokenized corpus."""
