"""Only the bearer of a token gets in, once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratagem.errors import LimitError, PeerUnavailableError
from stratagem.rpc import lane_listener as door_module
from stratagem.rpc.lane_listener import Kind, LaneListener, LaneTicket, connect_lane, peer_uid
from stratagem.rpc.security import OPEN
from tests.contract.rpc.securities import make_certificates, with_tls
from tests.polling import until


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def listener() -> Iterator[LaneListener]:
    made = LaneListener("127.0.0.1")
    yield made
    made.close()


def test_a_listener_without_a_free_descriptor_says_so_once_and_waits(
    listener: LaneListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It asked again at once, took a whole core from training, and nobody knew why."""
    waits: list[float | None] = []

    def accept() -> None:
        if len(waits) == 3:
            listener._closed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(listener._closed, "wait", waits.append)
    listener._accept(SimpleNamespace(accept=accept))  # type: ignore[arg-type]
    assert waits == [door_module._RETRY_S] * 4
    assert [record.message for record in caplog.records] == [
        "No lane can come in until something is free here: [Errno 24] Too many open files"
    ]


def test_a_listener_without_a_free_thread_says_so_and_goes_on(
    listener: LaneListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, short = threading.Thread.start, ["listener", "listener-check"]

    def start_unless_short(self: threading.Thread) -> None:
        if self.name in short:
            short.remove(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_unless_short)
    with pytest.raises(PeerUnavailableError, match=r"cannot listen for shm lanes .*: can't start new thread"):
        listener.expect("worker:1", "shm")
    ticket = listener.expect("worker:1", "shm")
    with pytest.raises(PeerUnavailableError, match="could not open a lane"):
        connect_lane(ticket, "127.0.0.1", soon())
    with connect_lane(ticket, "127.0.0.1", soon()), listener.wait("worker:1", soon()):
        pass
    assert [record.message for record in caplog.records] == [
        "A lane cannot come in until something is free here: can't start new thread"
    ]


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_visitor_with_a_token_gets_in(listener: LaneListener, kind: Kind) -> None:
    ticket = listener.expect(("worker:1", 4), kind)
    with connect_lane(ticket, "127.0.0.1", soon()) as outside, listener.wait(("worker:1", 4), soon()) as inside:
        outside.sendall(b"hello")
        assert inside.recv(5) == b"hello"
        if kind == "shm":
            assert peer_uid(inside) == os.getuid()


def test_a_name_is_connected_to_where_it_is_listened_at(
    listener: LaneListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that drops IPv6 let the first attempt last until there was no time for the second."""
    ticket = listener.expect("a", "tcp")
    here = (socket.SOCK_STREAM, 0, "")
    with socket.create_server(("::1", ticket.port), family=socket.AF_INET6):  # which never answers
        found = [
            (socket.AF_INET6, *here, ("::1", ticket.port, 0, 0)),
            (socket.AF_INET, *here, ("127.0.0.1", ticket.port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
        connect_lane(ticket, "host-b", soon(5)).close()
        listener.wait("a", soon()).close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_wrong_token_is_refused_and_the_right_one_still_works(listener: LaneListener, kind: Kind) -> None:
    ticket = listener.expect("a", kind)
    with pytest.raises(PeerUnavailableError, match="could not open a lane"):
        connect_lane(LaneTicket(bytes(32), ticket.port, ticket.socket_name), "127.0.0.1", soon())
    connect_lane(ticket, "127.0.0.1", soon()).close()
    listener.wait("a", soon()).close()


def test_a_lane_that_is_in_outlives_its_listener(listener: LaneListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was shut when the listener closed before the thread that had let it in had ended."""
    check, closed = LaneListener._check, threading.Event()

    def check_and_linger(self: LaneListener, peer: socket.socket) -> None:
        check(self, peer)
        closed.wait(10)

    monkeypatch.setattr(LaneListener, "_check", check_and_linger)
    ticket = listener.expect("a", "tcp")
    with connect_lane(ticket, "127.0.0.1", soon()) as outside, listener.wait("a", soon()) as inside:
        monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 0.1)
        listener.close()
        closed.set()
        outside.sendall(b"hello")
        assert inside.recv(5) == b"hello"


def test_a_token_works_once(listener: LaneListener) -> None:
    ticket = listener.expect("a", "tcp")
    connect_lane(ticket, "127.0.0.1", soon()).close()
    listener.wait("a", soon()).close()
    with pytest.raises(PeerUnavailableError):
        connect_lane(ticket, "127.0.0.1", soon())


def test_who_asks_again_gets_the_same_token_until_it_has_come_in(listener: LaneListener) -> None:
    """A request whose reply was lost may also come late, after the one that was made in its place."""
    ticket = listener.expect("a", "tcp")
    assert listener.expect("a", "tcp") == ticket
    connect_lane(ticket, "127.0.0.1", soon()).close()
    listener.wait("a", soon()).close()
    assert listener.expect("a", "tcp") != ticket


def test_visitors_that_say_nothing_keep_nobody_out(listener: LaneListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 60.0)  # longer than who has a token waits
    ticket = listener.expect("a", "tcp")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", ticket.port)))
        connect_lane(ticket, "127.0.0.1", soon()).close()
        listener.wait("a", soon()).close()
    monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 0.1)
    with socket.create_connection(("127.0.0.1", ticket.port), 30) as silent:
        assert silent.recv(1) == b""  # dropped


def test_waiting_ends_at_the_deadline_and_with_the_door(listener: LaneListener) -> None:
    with pytest.raises(PeerUnavailableError, match="did not connect"):
        listener.wait("nobody", soon(0.05))
    listener.expect(("worker:1", 2, "ring"), "tcp", "worker:1")
    with pytest.raises(PeerUnavailableError, match=r"^worker:1 did not connect in time$"):
        listener.wait(("worker:1", 2, "ring"), soon(0.05))
    ticket = listener.expect("a", "tcp")
    listener.close()
    with pytest.raises(PeerUnavailableError):
        connect_lane(ticket, "127.0.0.1", soon(1))
    with pytest.raises(PeerUnavailableError):
        listener.expect("b", "tcp")


def test_a_connection_that_does_not_come_about_leaves_no_socket_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerUnavailableError, match="could not open a lane at nobody") as refused:
        connect_lane(LaneTicket(b"", socket_name="nobody"), "", soon())
    assert len(os.listdir("/proc/self/fd")) == before and refused.tb is not None  # which has its variables


@pytest.mark.parametrize("host", ["::1", "::", "localhost", "0.0.0.0"])
def test_it_listens_wherever_a_server_does(host: str) -> None:
    listener = LaneListener(host)
    try:
        for caller in {"::": ("::1", "127.0.0.1"), "0.0.0.0": ("127.0.0.1",)}.get(host, (host,)):
            ticket = listener.expect("a", "tcp")
            connect_lane(ticket, caller, soon()).close()
            listener.wait("a", soon()).close()
    finally:
        listener.close()


def test_where_it_cannot_listen_the_peer_hears_why() -> None:
    listener = LaneListener("2001:db8::1")
    with pytest.raises(PeerUnavailableError, match=r"cannot listen for tcp lanes at 2001:db8::1: .*[Cc]annot assign"):
        listener.expect("a", "tcp")
    listener.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "ours", "ps:0", "worker:0", "worker:1")


def test_over_tls_the_token_opens_only_for_the_task_it_was_given_to(folder: Path) -> None:
    listener = LaneListener("127.0.0.1", with_tls(folder, "ps:0"))
    try:
        ticket = listener.expect("up", "tcp", "worker:0")
        with pytest.raises(PeerUnavailableError):
            connect_lane(ticket, "127.0.0.1", soon(), "ps:0", with_tls(folder, "worker:1"))  # used up, and refused
        with pytest.raises(PeerUnavailableError, match="did not connect"):
            listener.wait("up", soon(0.05))
        ticket = listener.expect("up", "tcp", "worker:0")
        outside = connect_lane(ticket, "127.0.0.1", soon(), "ps:0", with_tls(folder, "worker:0"))
        with outside, listener.wait("up", soon()) as inside:
            assert isinstance(outside, ssl.SSLSocket) and isinstance(inside, ssl.SSLSocket)
            outside.sendall(b"hello")
            assert inside.recv(5) == b"hello"
    finally:
        listener.close()


def test_over_tls_a_door_of_another_task_or_authority_and_one_in_the_clear_get_no_token(
    folder: Path, tmp_path: Path
) -> None:
    strangers = make_certificates(tmp_path / "strangers", "ps:0")
    for security in (with_tls(folder, "worker:1"), with_tls(strangers, "ps:0"), OPEN):
        listener = LaneListener("127.0.0.1", security)
        try:
            ticket = listener.expect("up", "tcp", "worker:0")
            with pytest.raises(PeerUnavailableError):
                connect_lane(ticket, "127.0.0.1", soon(), "ps:0", with_tls(folder, "worker:0"))
            assert listener._expected.tokens, "the token was shown"
        finally:
            listener.close()


def test_over_tls_visitors_in_the_clear_are_dropped(folder: Path) -> None:
    listener = LaneListener("127.0.0.1", with_tls(folder, "ps:0"))
    try:
        ticket = listener.expect("up", "tcp", "worker:0")
        with pytest.raises(PeerUnavailableError):
            connect_lane(ticket, "127.0.0.1", soon())
        connect_lane(ticket, "127.0.0.1", soon(), "ps:0", with_tls(folder, "worker:0")).close()
        listener.wait("up", soon()).close()
    finally:
        listener.close()


def test_a_visitor_that_dribbles_its_token_has_no_more_time_than_others(
    listener: LaneListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(door_module, "TOKEN_BYTES", 10_000)  # its end, which would be refused, does not come
    ticket = listener.expect("a", "tcp")
    with socket.create_connection(("127.0.0.1", ticket.port)) as slow:
        slow.settimeout(0.05)
        deadline, answer = soon(), None
        for byte in ticket.token:
            try:
                slow.sendall(bytes((byte,)))
                answer = slow.recv(1)
                break
            except TimeoutError:
                pass
            except ConnectionError:  # a byte had come that nobody read
                answer = b""
                break
            assert time.monotonic() < deadline, "the listener still listens"
        assert answer == b""


def test_when_too_many_visitors_wait_the_oldest_goes(listener: LaneListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_PENDING_PEERS", 4)
    monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 60.0)
    ticket = listener.expect("a", "tcp")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", ticket.port))) for _ in range(12)]
        for sock in silent[:8]:
            sock.settimeout(30)
            assert sock.recv(1) == b""  # sent away, long before its time is over
        until(lambda: sum(thread.name == "listener-check" for thread in threading.enumerate()) <= 5)
        connect_lane(ticket, "127.0.0.1", soon()).close()
        listener.wait("a", soon()).close()


def test_a_silent_tls_visitor_is_sent_away_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_PENDING_PEERS", 1)
    monkeypatch.setattr(door_module, "TOKEN_TIMEOUT_S", 60.0)
    folder = make_certificates(tmp_path, "ps:0", "worker:1")
    listener = LaneListener("127.0.0.1", with_tls(folder, "ps:0"))
    try:
        ticket = listener.expect("a", "tcp", "worker:1")
        with socket.create_connection(("127.0.0.1", ticket.port)) as silent:
            silent.settimeout(10)
            connect_lane(ticket, "127.0.0.1", soon(), "ps:0", with_tls(folder, "worker:1")).close()
            listener.wait("a", soon()).close()
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
    finally:
        listener.close()


def test_one_task_has_so_many_lanes_and_others_have_theirs() -> None:
    listener = LaneListener("127.0.0.1", max_lanes_per_peer=2)
    try:
        tickets = [listener.expect(("worker:1", index), "tcp", "worker:1") for index in range(2)]
        connect_lane(tickets[0], "127.0.0.1", soon()).close()
        # It comes in a moment after it was let in; nobody has taken it, and it still counts.
        until(lambda: listener._expected.arrived)
        with pytest.raises(LimitError, match="worker:1 has 2 lanes that are not open yet, which is max_lanes_per_peer"):
            listener.expect(("worker:1", 2), "tcp", "worker:1")
        listener.expect(("worker:1", 1), "tcp", "worker:1")  # in the place of its own older one
        listener.expect(("worker:2", 0), "tcp", "worker:2")
        listener.wait(("worker:1", 0), soon()).close()
        listener.expect(("worker:1", 2), "tcp", "worker:1")
    finally:
        listener.close()
