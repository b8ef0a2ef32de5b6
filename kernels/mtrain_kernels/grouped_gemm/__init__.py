"""One linear layer per group of rows: the experts of a mixture."""
