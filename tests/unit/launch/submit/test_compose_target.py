"""Jobs as compose projects, on an engine that is a script."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError
from stratagem.launch.submit import compose_target, patience
from stratagem.launch.submit.compose_target import FILE
from stratagem.launch.submit.entry_point import EntryPoint
from stratagem.launch.submit.plan import make_plan
from stratagem.launch.submit.record import JobRecord, JobState
from stratagem.launch.submit.request import JobRequest

RECORD = JobRecord("j", "compose", "t.py", "one", 1, 0, "2026-01-01")


def make_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A docker command that is a script."""
    (folder / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "docker").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


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
    make_docker(tmp_path, monkeypatch, "printf '\\033[2Kworker-0 | \\377 is no UTF-8\\n'")
    assert list(compose_target.logs(RECORD, tmp_path, follow=False)) == ["worker-0 | \ufffd is no UTF-8"]


def test_a_log_is_followed_to_the_end_of_the_job_over_a_connection_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"ID": "1", "Service": "worker-0", "ExitCode": 0}
    script = (
        f"cd {tmp_path}; echo >> $6; n=$(wc -l < $6); case $6 in\n"
        "ps) [ $n != 2 ] || exit 1; [ $n = 1 ] && State=running || State=exited; "  # and all is written meanwhile
        f"echo '{json.dumps(listed)[:-1]}, \"State\": \"'$State'\"}}';;\n"
        "logs) printf 'w-0 | one\\nw-1 | one\\n'; [ $n = 1 ] || printf 'w-1 | two\\nw-0 | one\\n';;\nesac"
    )
    make_docker(tmp_path, monkeypatch, script)
    monkeypatch.setattr(patience, "POLL_S", 0.0)
    monkeypatch.setattr(compose_target, "POLL_S", 0.0)
    lines = list(compose_target.logs(RECORD, tmp_path, follow=True))
    assert lines == ["w-0 | one", "w-1 | one", "w-1 | two", "w-0 | one"]


@pytest.mark.parametrize("ask", [compose_target.state, lambda job, folder: [*compose_target.logs(job, folder, False)]])
def test_without_a_docker_command_a_job_is_asked_for_in_vain(
    ask: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="install Docker's command line"):
        ask(RECORD, tmp_path)


def test_who_had_too_little_memory_comes_before_a_worker_that_failed_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {"worker-0": 1, "worker-1": 137, "ps-0": 137, "chief-0": 1}
    listed = [{"ID": name, "Service": name, "State": "exited", "ExitCode": code} for name, code in codes.items()]
    script = (
        f"[ $1 = compose ] && echo '{json.dumps(listed)}' && exit\n"
        "shift 3; for name; do [ $name = ps-0 ] && echo true || echo false; done"
    )
    make_docker(tmp_path, monkeypatch, script)
    state = compose_target.state(RECORD, tmp_path)
    assert state == JobState("failed", 137, "ps-0 ended with exit code 137 (OOMKilled: it needs more memory)")


def test_a_task_that_does_not_run_is_shown_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"worker-0": "running", "ps-0": "paused", "chief-0": "restarting"}
    listed = [{"ID": name, "Service": name, "State": state, "ExitCode": 0} for name, state in states.items()]
    make_docker(tmp_path, monkeypatch, f"echo '{json.dumps(listed)}'")
    state = compose_target.state(RECORD, tmp_path)
    assert state == JobState("running", None, "chief-0 (restarting), ps-0 (paused), worker-0")
