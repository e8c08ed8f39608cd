"""Collective communication among workers: schedules, groups, the reduction of gradients during backward."""
