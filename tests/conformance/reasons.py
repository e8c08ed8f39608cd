"""Reasons why a strategy cannot satisfy a law that rooms have in common: footnotes of the matrix."""

from __future__ import annotations

LENT_BY_NUMBER = (
    "The chief leases batches by number, of a map-style dataset in order or shuffled; other sources, `prefetch` and "
    "`on_empty` are refused."
)
ONE_IN_SYNC = "There is one replica in sync, which has all of a batch."
NO_SHARE = "A slice without examples is not a unit: the worker takes no part in the step, and gets no batch."
