"""The table of docs/conformance.md."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from pathlib import Path

from tests.conformance.law import Law
from tests.conformance.strategies import COLUMNS, Column

MATRIX = Path(__file__).parents[2] / "docs" / "conformance.md"
_HEAD = """\
# Every strategy, one law

Each row is a test of `tests/conformance`, run on every strategy that can satisfy it: ✔ is a run that passed, a number
refers to the reason below why there is none, and an empty cell means that the row is about other strategies. `make
conformance` runs them all and writes this page; the columns of the TPU strategy come from `make test-xla`, with
torch_xla on the CPU, and a ? there is a run that has yet to be made.

{columns}
"""


def render(laws: Sequence[Law], passed: Container[tuple[str, str]] | None = None) -> str:
    """The page.

    Args:
        laws: the rows.
        passed: text of the row and title of the column; None: all passed wherever they apply.
    """

    def cell(law: Law, column: Column) -> str:
        if column in law.without:
            return _number(law.without[column], reasons)
        return "✔" if passed is None or (law.text, column.title) in passed else "?"

    reasons: dict[str, int] = {}
    parts = [_HEAD.format(columns="\n".join(map(_describe, COLUMNS)))]
    for room, rows in itertools.groupby(laws, lambda law: law.room):
        parts.append(f"## {room}\n")
        parts.append("| | " + " | ".join(column.title for column in COLUMNS) + " |")
        parts.append("|---|" + ":-:|" * len(COLUMNS))
        for law in rows:
            parts.append(f"| {law.text} | " + " | ".join(cell(law, column) for column in COLUMNS) + " |")
        parts.append("")
    parts += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(parts) + "\n"


def ticked(page: str) -> set[tuple[str, str]]:
    """The cells of a page that passed."""
    found: set[tuple[str, str]] = set()
    titles: list[str] = []
    for line in page.splitlines():
        text, *cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else [""]
        if line.startswith("| |"):
            titles = [cell.strip() for cell in line.strip("|").split("|")][1:]
        found.update((text, title) for title, cell in zip(titles, cells, strict=False) if cell == "✔")
    return found


def _number(reason: str, reasons: dict[str, int]) -> str:
    if not reason:
        return ""
    sentence = f"{reason[0].upper()}{reason[1:].rstrip('.')}."
    return str(reasons.setdefault(sentence, len(reasons) + 1))


def _describe(column: Column) -> str:
    replicas = f"{column.num_replicas} {'replica' if column.num_replicas == 1 else 'replicas'} in sync"
    if column.num_xla_devices:
        how = "by SPMD over {} devices" if column.num_xla_devices > 1 else "on {} device, by its launcher"
        return f"- *{column.title}*: {replicas}, on torch_xla with the CPU {how.format(column.num_xla_devices)}"
    if column.build is not None:
        return f"- *{column.title}*: {replicas}, in one process"
    servers = f", {column.num_ps} ps" if column.num_ps else ""
    return f"- *{column.title}*: {replicas}, {column.num_workers} worker processes{servers}"
