"""A task that has ended well in a run of its supervisor is not run again in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stratagem.cli import roles

RUN = ["--chief", "127.0.0.1:1", "--task", "ps:1"]


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the next runs of the role end with; taken one after the other."""
    left: list[int] = []
    entry: Any = lambda config: left.pop(0)  # noqa: E731
    monkeypatch.setattr(roles, "role_entry", lambda role: entry)
    return left


def run(folder: Path, run_id: str) -> int:
    flags = [*RUN, "--checkpoint-dir", str(folder), "--run-id", run_id]
    code = CliRunner().invoke(roles.ps_command, flags, standalone_mode=False).return_value
    assert isinstance(code, int)
    return code


def test_after_a_good_end_the_same_run_is_not_repeated_and_another_is(tmp_path: Path, codes: list[int]) -> None:
    codes += [1, 0, 7]
    assert run(tmp_path, "one") == 1, "a failure is repeated"
    assert run(tmp_path, "one") == 0
    assert run(tmp_path, "one") == 0 and codes == [7], "it did not run"
    assert run(tmp_path, "two") == 7


def test_without_an_id_everything_runs(tmp_path: Path, codes: list[int]) -> None:
    codes += [0, 0]
    assert run(tmp_path, "") == run(tmp_path, "") == 0
    assert not codes and not list(tmp_path.iterdir())


def test_the_chief_that_worker_0_starts_hears_the_cluster_file(
    tmp_path: Path, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"STRATAGEM_SESSION_TIMEOUT_S": "9"})
    monkeypatch.setattr(roles, "role_entry", lambda role: lambda *_: 0)
    file = tmp_path / "cluster.yaml"
    file.write_text("{cluster: {worker: [h:1]}, defaults: {min_workers: 1}, chief: {worker_timeout_s: 7.0, bind: h:2}}")
    arguments = ["--cluster", str(file), "--task", "worker:0", __file__]
    assert CliRunner().invoke(roles.worker_command, arguments, standalone_mode=False).return_value == 0
    told = {name: value for name, value in os.environ.items() if name.endswith(("_S", "_WORKERS", "_BIND"))}
    expected = {"STRATAGEM_SESSION_TIMEOUT_S": "9.0", "STRATAGEM_WORKER_TIMEOUT_S": "7.0"}
    assert told == {**expected, "STRATAGEM_MIN_WORKERS": "1", "STRATAGEM_BIND": "h:0"}
