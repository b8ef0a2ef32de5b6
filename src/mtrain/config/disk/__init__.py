"""Files of a user, read within bounds."""
