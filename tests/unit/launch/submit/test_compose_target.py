"""Jobs as compose projects, on an engine that is a script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratagem.launch.submit import compose_target
from stratagem.launch.submit.compose_target import FILE
from stratagem.launch.submit.entry_point import EntryPoint
from stratagem.launch.submit.plan import make_plan
from stratagem.launch.submit.record import JobRecord
from stratagem.launch.submit.request import JobRequest


def test_what_was_started_is_taken_back_also_when_the_user_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compose(folder: Path, job_id: str, arguments: list[str], what: str) -> str:
        asked.append(arguments[0])
        if arguments[0] == "up":
            raise KeyboardInterrupt
        return ""

    for name in ("build", "forget"):
        monkeypatch.setattr(compose_target, name, lambda image, name=name: asked.append(name))
    monkeypatch.setattr(compose_target, "num_cores", lambda: 2)
    monkeypatch.setattr(compose_target, "_compose", compose)
    (tmp_path / "t.py").write_text("")
    plan = make_plan(JobRequest(target="compose"), EntryPoint(tmp_path / "t.py"), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compose_target.submit(plan, tmp_path, lambda image, place: asked.append("record"))
    assert asked == ["build", "record", "up", "down", "forget"] and (tmp_path / FILE).exists()


def test_logs_are_shown_whatever_bytes_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nprintf '\\033[2Kworker-0 | \\377 is no UTF-8\\n'\n")
    docker.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    record = JobRecord("j", "compose", "t.py", "one", 1, 0, "2026-01-01")
    assert list(compose_target.logs(record, tmp_path, follow=False)) == ["worker-0 | \ufffd is no UTF-8"]
