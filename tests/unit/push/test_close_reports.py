"""What ps hear of closed units when there is another number of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

from stratagem.cluster.units import Unit
from stratagem.worker.push.close_reports import CloseReports

UNIT, LATER = Unit(1, 0, 0), Unit(1, 0, 1)


def test_another_ps_does_not_hear_from_one_without_a_part_in_a_unit_that_it_needs_no_update() -> None:
    """One that had gone back to an older checkpoint closed the unit: two lost updates were not told to be lost."""
    clients: list[Any] = [mock.Mock(index=0), mock.Mock(index=1)]
    reports = CloseReports(clients, mock.Mock())
    for unit in (UNIT, LATER):
        reports.pushed([unit], [1])
        reports.add([unit])
    assert reports.for_ps(0) == [(UNIT, 0), (LATER, 0)]
    reports.acknowledged(1, 1)
    del clients[1]
    reports.rerouted()
    assert reports.for_ps(0) == [(LATER, 1)], "of the other one the ps of before has heard"
