"""A worker's connection to a ps, before there is one."""

import logging
import types
from typing import Any

import grpc
import pytest

from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.worker.push import ps_client


class NoDescriptors(grpc.RpcError):
    """As gRPC says it: behind the reason is memory that is no text."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "failed to connect; last error: INTERNAL: socket: Too many open files\n\0\xb1[\0\xff"

    def trailing_metadata(self) -> Any:
        return ()


def client_of(member: Member) -> ps_client.PsClient:
    session: Any = types.SimpleNamespace(
        membership=Membership(members=(member,), num_ps=1),
        task="worker:0",
        incarnation=1,
        security=OPEN,
        raise_if_stopped=lambda: None,
        wait_stopped=lambda timeout_s: None,
    )
    config = WorkerConfig(task="worker:0", chief="127.0.0.1:1", peer_timeout_s=0.1)
    return ps_client.PsClient(session, 0, BytesMeter(), config)


@pytest.mark.parametrize(
    ("member", "why", "words"),
    [
        (
            Member("ps:0", "127.0.0.1:1", 1, live=True),
            "ps:0 cannot be reached",
            r"firewall\? Its port, 127.0.0.1:1, has",
        ),
        (Member("ps:0", "", 0, live=False), "ps:0 has not joined the cluster", "it did not come back"),
        (Member("ps:0", "127.0.0.1:1", 1, live=False), "ps:0 is gone, and not back yet", "it did not come back"),
    ],
)
def test_a_ps_that_cannot_be_reached_is_not_waited_for_in_silence(
    member: Member, why: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ps_client, "SILENCE_S", 0.0, raising=False)
    client = client_of(member)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(PeerUnavailableError, match=f"waited 0 s for ps:0 and .*{words}"),
    ):
        client.connect()
    [waiting] = [record.getMessage() for record in caplog.records if "Waiting for ps:0" in record.getMessage()]
    assert why in waiting


def test_a_worker_without_descriptors_says_so_and_asks_for_no_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ps_client.PsClient, info: Member) -> None:
        raise error_from_rpc(NoDescriptors(), "ps:0")

    monkeypatch.setattr(ps_client.PsClient, "_open", fail)
    words = "cannot reach it, though the chief hears from it: this process cannot reach ps:0: it has too many files "
    with pytest.raises(PeerUnavailableError, match=f"{words}open; raise `ulimit -n`.$"):
        client_of(Member("ps:0", "127.0.0.1:1", 1, live=True)).connect()
