"""The rows of the matrix: what a strategy must do, each a test that is run on every strategy that can do it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

import stratagem as sg
from tests.conformance.strategies import COLUMNS, Column

Scenario = Callable[[sg.Strategy], Any]
Test = TypeVar("Test", bound=Callable[..., None])


@dataclasses.dataclass(frozen=True, eq=False)
class Law:
    """A row."""

    room: str
    """First line of the docstring of the test module."""
    text: str
    scenario: Scenario | None
    without: Mapping[Column, str]
    """Columns that cannot satisfy it, and why."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those that must satisfy it."""
        return tuple(column for column in COLUMNS if column not in self.without)


LAWS: dict[tuple[str, str], Law] = {}
"""By test module and text, in the order of definition."""


def law(
    text: str, scenario: Scenario | None = None, *, without: Mapping[Column, str] | None = None
) -> Callable[[Test], Test]:
    """Makes a test function a row of the matrix.

    The test takes ``column`` and, if there is a scenario, ``results``: what each worker's scenario returned. An error
    of a scenario is raised by ``results``; a scenario that expects one catches it.

    Args:
        text: the row; Markdown.
        scenario: a function of a module of ``scenarios``, called in each process of the column with the strategy.
        without: columns that cannot satisfy it, and why, as a footnote; see :func:`cannot` and :func:`only`.
    """

    def decorate(test: Test) -> Test:
        module = sys.modules[test.__module__]
        room = (module.__doc__ or test.__module__).strip().splitlines()[0].rstrip(".")
        found = Law(room, text, scenario, dict(without or {}))
        LAWS[test.__module__, text] = found
        parameters = [
            pytest.param(column, id=column.name, marks=[pytest.mark.thorough] * column.is_thorough)
            for column in found.columns
        ]
        decorated: Test = pytest.mark.law(found)(pytest.mark.parametrize("column", parameters)(test))
        return decorated

    return decorate


def cannot(columns: Column | Sequence[Column], reason: str) -> dict[Column, str]:
    """Columns with the reason why they cannot satisfy a law; several are joined with ``|``."""
    return dict.fromkeys([columns] if isinstance(columns, Column) else columns, reason)


def only(columns: Column | Sequence[Column]) -> dict[Column, str]:
    """For a law that is about some strategies and says nothing of the others, whose cells stay empty."""
    chosen = [columns] if isinstance(columns, Column) else columns
    return dict.fromkeys([column for column in COLUMNS if column not in chosen], "")


def runs_late(scenario: Scenario) -> Scenario:
    """Marks a scenario after which the workers do not reach each other: real processes run it after all others.

    There can be one of them, as it needs the other workers itself.
    """
    scenario.__dict__["turn"] = 1
    return scenario


def runs_last(scenario: Scenario) -> Scenario:
    """As :func:`runs_late`, for any number of scenarios that need no other worker; they come after that one."""
    scenario.__dict__["turn"] = 2
    return scenario


def runs_alone(scenario: Scenario) -> Scenario:
    """Marks a scenario that breaks the strategy: real processes run it in a launch of its own."""
    scenario.__dict__["runs_alone"] = True
    return scenario
