"""A worker's connection to a ps, before there is one."""

import logging
import types
from typing import Any

import pytest

from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.worker.push import ps_client


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
    membership = Membership(members=(member,), num_ps=1)
    session: Any = types.SimpleNamespace(
        membership=membership,
        task="worker:0",
        incarnation=1,
        security=OPEN,
        raise_if_stopped=lambda: None,
        wait_stopped=lambda timeout_s: None,
    )
    config = WorkerConfig(task="worker:0", chief="127.0.0.1:1", peer_timeout_s=0.1)
    client = ps_client.PsClient(session, 0, BytesMeter(), config)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(PeerUnavailableError, match=f"waited 0 s for ps:0 and .*{words}"),
    ):
        client.connect()
    [waiting] = [record.getMessage() for record in caplog.records if "Waiting for ps:0" in record.getMessage()]
    assert why in waiting
