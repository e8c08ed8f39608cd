"""Collective communication among workers: forming a ring, the groups that move tensors, positions and blame."""
