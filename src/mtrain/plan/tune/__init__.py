"""The search for a layout: the choices, a lower bound of the time of each, and the best of them."""
