"""Lanes that workers ask for, and do not come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import get_args

import pytest

from stratagem.errors import PeerUnavailableError
from stratagem.ps import socket_lanes
from stratagem.ps.requests import Family, Purpose, Sender
from stratagem.ps.socket_lanes import SocketLanes, TcpReplies
from stratagem.ps.store import Store
from stratagem.rpc.lane_listener import LaneTicket, connect_lane
from tests.polling import until


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def lanes(store: Store) -> Iterator[SocketLanes]:
    lanes = SocketLanes(store, "127.0.0.1", max_lanes_per_peer=4)
    yield lanes
    lanes.close()


def ask(lanes: SocketLanes, sender: Sender, family: Family = "tcp") -> list[LaneTicket]:
    return [lanes.open(sender, family, purpose) for purpose in get_args(Purpose)]


def test_tickets_of_those_who_do_not_come_are_forgotten(lanes: SocketLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each incarnation left two, and the 65th was refused: max_lanes_per_peer."""
    monkeypatch.setattr(socket_lanes, "CONNECT_S", 0.01)
    for incarnation in range(3):
        lanes.open(Sender("worker:0", incarnation), "tcp", "up")
        with contextlib.suppress(PeerUnavailableError):  # it was fast, or too late
            lanes.open(Sender("worker:0", incarnation), "tcp", "down")
        until(lambda: not lanes._listener._expected.tokens)
        until(lambda: not any(thread.is_alive() for thread in lanes._threads))
    assert not lanes._expected


def test_a_lane_is_of_the_family_that_was_asked_for_last(
    lanes: SocketLanes, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for the shm lane, which the worker could not have, took the sockets of the tcp lane for it."""
    opened: list[object] = []
    monkeypatch.setattr(store, "open_lane", lambda sender, replies: opened.append(replies))
    ask(lanes, Sender("worker:0", 3), "shm")
    with contextlib.ExitStack() as stack:
        for ticket in ask(lanes, Sender("worker:0", 3)):
            stack.enter_context(connect_lane(ticket, "127.0.0.1", time.monotonic() + 10))
        until(lambda: bool(opened))
    assert isinstance(opened[0], TcpReplies)
