"""A pod's log over a connection that breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from urllib3.exceptions import ProtocolError

from stratagem.errors import SubmitError
from stratagem.launch.submit import kubernetes_target, patience
from stratagem.launch.submit.kubernetes_client import Cluster
from stratagem.launch.submit.record import JobRecord, JobState
from tests.unit.launch.submit.api_server import api_server


class BrokenAnswer:
    """One line, and then nothing more comes."""

    def __iter__(self) -> Iterator[bytes]:
        yield b"line 1\n"
        raise ProtocolError("Response ended prematurely")

    def release_conn(self) -> None:
        pass


def test_a_connection_that_breaks_ends_what_is_followed_and_fails_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api_server(tmp_path) as server:
        cluster = Cluster(kubeconfig=str(server.kubeconfig))
    answers = SimpleNamespace(read_namespaced_pod_log=lambda *arguments, **options: BrokenAnswer())
    monkeypatch.setattr(cluster, "_group", lambda version: answers)
    assert list(cluster.log("worker-0", follow=True)) == ["line 1"]  # who follows asks for the job, and goes on
    with pytest.raises(SubmitError, match="could not be asked to read the log of worker-0: Response ended"):
        list(cluster.log("worker-0", follow=False))
    cluster.close()


def test_a_log_is_followed_over_a_server_that_starts_again_but_not_one_that_never_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = [JobState("running"), SubmitError("refused"), JobState("succeeded")]

    def state(record: JobRecord, folder: Path) -> JobState:
        if isinstance(now := said.pop(0), SubmitError):
            raise now
        return now  # type: ignore[no-any-return]

    pod = {"metadata": {"name": "w", "uid": "1"}, "status": {"phase": "Running", "containerStatuses": []}}
    cluster = SimpleNamespace(pods=lambda selector: [pod], log=lambda pod, follow: ["line"], close=lambda: None)
    for name, value in {"Cluster": lambda **place: cluster, "state": state, "_news": lambda *of: []}.items():
        monkeypatch.setattr(kubernetes_target, name, value)
    monkeypatch.setattr(kubernetes_target, "_has_started", lambda pod: True)
    monkeypatch.setattr(kubernetes_target, "_containers", lambda pod: [])
    for module in (kubernetes_target, patience):
        monkeypatch.setattr(module, "POLL_S", 0.0)
    record = JobRecord("j", "kubernetes", "t.py", "one", 1, 0, "2026-01-01")
    assert list(kubernetes_target.logs(record, tmp_path, follow=True)) == ["line"] and not said
    said.append(SubmitError("refused"))
    with pytest.raises(SubmitError):
        list(kubernetes_target.logs(record, tmp_path, follow=True))
