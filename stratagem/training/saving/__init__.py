"""Saving a script's objects: their states, which tasks save together, how many of the newest are kept."""
