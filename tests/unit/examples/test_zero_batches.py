"""A restarted worker walks through epochs that are over without a batch: the examples say nothing about them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg

EXAMPLES = Path(__file__).parents[3] / "examples"


class MissedEpochs(sg.OneDeviceStrategy):
    """Gives no batches at all, like a closed epoch."""

    def distribute_dataset(self, source: Any, **_: Any) -> Any:
        class Nothing:
            epoch = 0

            def __iter__(self) -> Iterator[Any]:
                return iter(())

        return Nothing()


@pytest.mark.parametrize(
    ("name", "arguments", "last"),
    [
        ("digits", [], "held-out accuracy"),
        ("charlm", ["--width", "8", "--layers", "1", "--text-bytes", "5000", "--sample-bytes", "5"], "--- sample ---"),
    ],
)
def test_epochs_without_batches_print_nothing(
    name: str, arguments: list[str], last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location(f"missed_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sg, "strategy_from_environment", lambda *chosen: MissedEpochs("cpu"), raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--epochs", "3", *arguments])
    assert module.main() == 0
    printed = capsys.readouterr().out
    assert "epoch" not in printed
    assert last in printed
