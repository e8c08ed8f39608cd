"""Which exit code and words the end of a script becomes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from stratagem.errors import CollectiveError
from stratagem.worker.script_runner import follows, run_script, uses_torch_distributed


@pytest.mark.parametrize(
    ("error", "code"), [("ConfigurationError", 2), ("ForbiddenError", 2), ("CheckpointError", 1), ("StratagemError", 1)]
)
def test_what_no_restart_can_help_is_exit_code_2(tmp_path: Path, error: str, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from stratagem.errors import {error}\nraise {error}('why')\n")
    outcome = run_script(str(script), [])
    assert outcome.exit_code == code and outcome.message.startswith(f"{error}: why (at ")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (-1, 255), (256, 0), (2**40 + 7, 7)])
@pytest.mark.parametrize("end", ["raise SystemExit({})", "import sys; sys.exit({})"])
def test_a_status_becomes_the_code_of_a_process(tmp_path: Path, end: str, status: int, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(end.format(status))
    outcome = run_script(str(script), [])
    assert (outcome.exit_code, bool(outcome.message)) == (code, code != 0)


def test_an_error_that_has_no_words_is_told_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("class Odd(Exception):\n    def __str__(self): raise KeyError\n" + (end := "raise Odd"))
    outcome = run_script(str(script), [])
    assert (outcome.exit_code, outcome.message) == (1, "Odd: <its __str__ fails: KeyError>")
    assert end in outcome.traceback
    script.write_text(script.read_text().replace(end, "raise SystemExit(Odd())"))
    assert run_script(str(script), []).message == "<its __str__ fails: KeyError>"


@pytest.mark.parametrize("parts", [("pkg",), ("pkg", "inner")])
def test_a_file_that_needs_its_package_is_told_how_to_run_it(tmp_path: Path, parts: tuple[str, ...]) -> None:
    folder = tmp_path.joinpath(*parts)
    folder.mkdir(parents=True)
    for init in (folder, *folder.parents)[: len(parts)]:
        (init / "__init__.py").write_text("VALUE = 1")
    script = folder / "train.py"
    script.write_text("from . import VALUE")
    outcome = run_script(str(script), [])
    name = ".".join((*parts, "train"))
    assert outcome.exit_code == 1 and f"package; in {tmp_path}, `-m {name}` instead of the file" in outcome.message
    assert outcome.message in outcome.traceback


@pytest.mark.parametrize("line", ["input()", "import bdb; raise bdb.BdbQuit"])
def test_who_waits_for_words_is_told_where_they_are_heard(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "a train.py"
    script.write_text(line)
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        outcome = run_script(str(script), [])
    assert outcome.exit_code == 1 and f"breakpoint() are for `python '{script}'`, one process" in outcome.message
    assert outcome.message in outcome.traceback


def test_errors_that_are_causes_of_one_another_follow_no_task() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert not follows(first)
    second.__cause__ = CollectiveError("worker:1 is gone")
    assert follows(first)


def test_a_process_group_at_a_store_of_the_script_counts_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ended with 2: "its script has made no strategy"."""
    for name in ("_backend", "_default_pg_init_method"):
        monkeypatch.setattr(c10d, name, None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there, for good
    assert not uses_torch_distributed()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert uses_torch_distributed()
