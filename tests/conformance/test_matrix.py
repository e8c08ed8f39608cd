"""The committed table shows the laws and columns that the suite has."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.conformance.law import LAWS
from tests.conformance.matrix import MATRIX, render


def test_the_committed_matrix_is_that_of_the_suite() -> None:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.conformance.{path.stem}")
    assert MATRIX.read_text(encoding="utf-8") == render(list(LAWS.values())), (
        "docs/conformance.md is old: run `make conformance`, and `make test-xla`"
    )
