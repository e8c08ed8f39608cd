"""A pod's log over a connection that breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from urllib3.exceptions import ProtocolError

from stratagem.errors import SubmitError
from stratagem.launch.submit.kubernetes_client import Cluster
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
