"""Checkpoints of the ps: taken, found, restored."""
