"""The table of docs/conformance.md."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.law import Law
from tests.conformance.strategies import COLUMNS, Column

MATRIX = Path(__file__).parents[2] / "docs" / "conformance.md"
_HEAD = """\
# Every strategy, one law

Each row is a test of `tests/conformance`, run on every strategy that can satisfy it: ✔ is a run that passed, a number
the reason why there is none, below; where a cell is empty, the row is about other strategies. `make conformance` runs
them all and writes this page.

{columns}
"""


def render(laws: Sequence[Law]) -> str:
    """The page, of laws that all passed wherever they apply."""
    reasons: dict[str, int] = {}
    parts = [_HEAD.format(columns="\n".join(map(_describe, COLUMNS)))]
    for room, rows in itertools.groupby(laws, lambda law: law.room):
        parts.append(f"## {room}\n")
        parts.append("| | " + " | ".join(column.title for column in COLUMNS) + " |")
        parts.append("|---|" + ":-:|" * len(COLUMNS))
        for law in rows:
            cells = ["✔" if column not in law.without else _number(law.without[column], reasons) for column in COLUMNS]
            parts.append(f"| {law.text} | " + " | ".join(cells) + " |")
        parts.append("")
    parts += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(parts) + "\n"


def _number(reason: str, reasons: dict[str, int]) -> str:
    if not reason:
        return ""
    sentence = f"{reason[0].upper()}{reason[1:].rstrip('.')}."
    return str(reasons.setdefault(sentence, len(reasons) + 1))


def _describe(column: Column) -> str:
    replicas = f"{column.num_replicas} {'replica' if column.num_replicas == 1 else 'replicas'} in sync"
    if column.on_stand_in:
        return f"- *{column.title}*: {replicas}, {column.num_workers} threads on a stand-in for torch_xla"
    if column.build is not None:
        return f"- *{column.title}*: {replicas}, in one process"
    servers = f", {column.num_ps} ps" if column.num_ps else ""
    return f"- *{column.title}*: {replicas}, {column.num_workers} worker processes{servers}"
