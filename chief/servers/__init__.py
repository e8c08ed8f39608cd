"""The ps, as the chief speaks with them."""
