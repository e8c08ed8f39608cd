"""Only the bearer of a token gets in, once."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from stratagem.errors import PeerUnavailableError
from stratagem.rpc import door as door_module
from stratagem.rpc.door import Door, Way, knock, peer_uid


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_visitor_with_a_token_gets_in(door: Door, family: socket.AddressFamily) -> None:
    way = door.expect(("worker:1", 4), family)
    with knock(way, "127.0.0.1", soon()) as outside, door.wait(("worker:1", 4), soon()) as inside:
        outside.sendall(b"hello")
        assert inside.recv(5) == b"hello"
        if family == socket.AF_UNIX:
            assert peer_uid(inside) == os.getuid()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_wrong_token_is_refused_and_the_right_one_still_works(door: Door, family: socket.AddressFamily) -> None:
    way = door.expect("a", family)
    with pytest.raises(PeerUnavailableError, match="could not open a lane"):
        knock(Way(bytes(32), way.port, way.socket_name), "127.0.0.1", soon())
    knock(way, "127.0.0.1", soon()).close()
    door.wait("a", soon()).close()


def test_a_token_works_once(door: Door) -> None:
    way = door.expect("a", socket.AF_INET)
    knock(way, "127.0.0.1", soon()).close()
    door.wait("a", soon()).close()
    with pytest.raises(PeerUnavailableError):
        knock(way, "127.0.0.1", soon())


def test_a_newer_token_replaces_the_older(door: Door) -> None:
    old, new = door.expect("a", socket.AF_INET), door.expect("a", socket.AF_INET)
    with pytest.raises(PeerUnavailableError):
        knock(old, "127.0.0.1", soon())
    knock(new, "127.0.0.1", soon()).close()
    door.wait("a", soon()).close()


def test_visitors_that_say_nothing_keep_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 0.5)
    way = door.expect("a", socket.AF_INET)
    silent = [socket.create_connection(("127.0.0.1", way.port)) for _ in range(20)]
    knock(way, "127.0.0.1", soon()).close()
    door.wait("a", soon()).close()
    for sock in silent:
        assert sock.recv(1) == b""  # dropped
        sock.close()


def test_waiting_ends_at_the_deadline_and_with_the_door(door: Door) -> None:
    with pytest.raises(PeerUnavailableError, match="did not connect"):
        door.wait("nobody", soon(0.05))
    way = door.expect("a", socket.AF_INET)
    door.close()
    with pytest.raises(PeerUnavailableError):
        knock(way, "127.0.0.1", soon(1))
    with pytest.raises(PeerUnavailableError):
        door.expect("b", socket.AF_INET)
