"""The language of ``--chaos``, and the relay that cuts and resets connections."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from unittest.mock import Mock

import pytest

from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.chaos.events import STANDBY, ChaosEvent, connections, parse
from stratagem.launch.chaos.injector import ChaosInjector, chaos_words
from stratagem.launch.chaos.relay import Relay, owner_of
from stratagem.launch.processes import TaskProcess
from stratagem.rpc.status_view import StatusView, TaskState

CHIEF, PS0, PS1, WORKER0, WORKER1 = TASKS = tuple(
    TaskId.parse(task) for task in ("chief:0", "ps:0", "ps:1", "worker:0", "worker:1")
)


def test_events_are_read_from_their_text() -> None:
    events, drawn = parse(
        "kill ps:1@step=200;pause worker:0@20.5s for=5s; slow worker:1 x4 ;; cut worker:1-ps:0 for=10; stop chief",
        TASKS,
    )
    assert events == [
        ChaosEvent("kill ps:1@step=200", "kill", (PS1,), step=200),
        ChaosEvent("pause worker:0@20.5s for=5s", "pause", (WORKER0,), at_s=20.5, for_s=5.0),
        ChaosEvent("slow worker:1 x4", "slow", (WORKER1,), factor=4.0),
        ChaosEvent("cut worker:1-ps:0 for=10", "cut", (WORKER1, PS0), for_s=10.0),
        ChaosEvent("stop chief", "stop", (CHIEF,)),
    ]
    assert drawn == []


def test_the_chief_that_stands_by_has_a_name_and_no_connections() -> None:
    tasks = (CHIEF, STANDBY, PS0, WORKER0)
    events, drawn = parse("kill standby; random seed=1", tasks)
    assert events == [ChaosEvent("kill standby", "kill", (STANDBY,))]
    assert not any(STANDBY in event.targets for event in itertools.islice(drawn[0], 200))
    assert not any(STANDBY in pair for pair in connections(tasks))
    with pytest.raises(ConfigurationError, match="no task 'standby'"):
        parse("kill standby", TASKS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode ps:0", "'explode ps:0' begins with none of kill, stop, pause"),
        ("kill", "'kill' does not say whom"),
        ("kill ps:7", "this job has no task 'ps:7' .* it has chief, ps:0, ps:1, worker:0, worker:1"),
        ("kill ps:0@", "@ in 'kill ps:0@' is neither @step=200 nor @20s"),
        ("kill ps:0@step=-1", "neither @step=200 nor @20s"),
        ("kill ps:0 for=3s", "'for=3s' means nothing in 'kill ps:0 for=3s'"),
        ("kill ps:0-ps:1", "kill takes one task, such as worker:1"),
        ("pause ps:0", "does not say for how long: for=5s"),
        ("slow ps:0", "does not say how much: x4 makes it four times as slow"),
        ("slow ps:0 x1", "'x1' means nothing"),
        ("cut ps:0 for=3s", "cut takes two tasks, such as worker:1-ps:0"),
        ("cut ps:0-ps:1 for=3s", "ps:0 and ps:1 have no connection"),
        ("random every=0", "'every=0' means nothing in 'random every=0'"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse(text, TASKS)


def test_random_events_are_equal_for_an_equal_seed() -> None:
    (one,), (other,), (third,) = (
        parse(f"random every=2s seed={seed}", TASKS)[1] for seed in (3, 3, 4)
    )  # fmt: skip
    events = list(itertools.islice(one, 200))
    assert events == list(itertools.islice(other, 200)) != list(itertools.islice(third, 200))
    assert {event.verb for event in events} == {"kill", "pause", "slow", "cut", "reset"}
    assert 300 < events[-1].at_s < 500
    assert all(event.targets in connections(TASKS) for event in events if event.verb in ("cut", "reset"))


def test_workers_of_a_ring_are_connected_and_others_are_not() -> None:
    assert (WORKER0, WORKER1) in connections((CHIEF, WORKER0, WORKER1))
    assert (WORKER0, WORKER1) not in connections(TASKS)


def test_the_line_about_the_cost_names_what_did_not_happen() -> None:
    records: list[dict[str, object]] = [
        {"event": "kill ps:0", "after_s": 1.0, "step": 4, "updates_lost": 3, "standstill_s": 2.5},
        {"event": "kill ps:1@step=9"},
    ]
    assert chaos_words(records) == (
        "chaos: 1 of 2 faults happened, longest standstill 2.5 s (kill ps:0), 3 updates lost; "
        "the job was over before kill ps:1@step=9"
    )


def test_what_was_told_to_be_lost_at_the_end_is_of_the_last_fault() -> None:
    process = Mock(spec=TaskProcess, pid=7)
    injector = ChaosInjector("kill ps:0; kill ps:1@step=9", TASKS, Mock(), has_copies=False)
    for lost in (2, 3):
        status = StatusView(tasks=(TaskState("worker:0", "live", step=1),), updates_lost=lost)
        injector.tick(0.0, status, {PS0: process, PS1: process})
    process.send.assert_called_once_with(signal.SIGKILL)
    assert injector.fired[0].updates_lost == 1
    fired, waits = injector.records(updates_lost=7)
    assert (fired["updates_lost"], waits) == (5, {"event": "kill ps:1@step=9"})


def test_a_slowed_task_can_be_paused_and_is_slow_again_afterwards() -> None:
    """The slowness woke it in its pause, and ended with that."""
    process = Mock(spec=TaskProcess, pid=7)
    injector = ChaosInjector("slow ps:0 x4; pause ps:0@1s for=1s", TASKS, Mock(), has_copies=False)
    status = StatusView(tasks=(TaskState("worker:0", "live", step=1),))

    def sent(*times: float) -> set[int]:
        process.send.reset_mock()
        for now in times:
            injector.tick(now, status, {PS0: process})
        return {call.args[0] for call in process.send.call_args_list}

    assert sent(0.0, 0.51) == {signal.SIGCONT, signal.SIGSTOP}
    assert sent(1.0, 1.21, 1.41, 1.99) == {signal.SIGSTOP}
    assert sent(2.01, 2.12, 5.01, 5.12) == {signal.SIGCONT, signal.SIGSTOP}


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with one, contextlib.suppress(ConnectionResetError):
                while data := one.recv(1024):
                    one.sendall(data)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_relay_holds_and_resets_the_connections_of_one_client(echo: str) -> None:
    me = {"me": os.getpid()}
    relay = Relay(echo, lambda client, server: owner_of(client, server, me))
    host, _, port = relay.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 60.0) as one:
            one.sendall(b"a")
            assert one.recv(10) == b"a"
            began = time.monotonic()
            assert (relay.hold(5.0, "another"), relay.hold(0.3, "me")) == (0, 1)
            one.sendall(b"b")
            assert one.recv(10) == b"b" and time.monotonic() - began >= 0.28  # late, not lost
            assert relay.reset(0.3, "me") == 1
            with pytest.raises(ConnectionResetError):
                one.recv(10)
        deadline = time.monotonic() + 60
        while True:  # until new connections live again
            try:
                with socket.create_connection((host, int(port)), 60.0) as again:
                    again.sendall(b"c")
                    if again.recv(10) == b"c":
                        break
            except OSError:
                assert time.monotonic() < deadline
    finally:
        relay.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "as gRPC"])
def test_a_connection_has_an_owner_or_none(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        host, port = server.getsockname()
        client.connect((f"::ffff:{host}" if family is socket.AF_INET6 else host, port))
        ends = (host, client.getsockname()[1]), (host, port)
        assert owner_of(*ends, {"parent": os.getppid(), "me": os.getpid()}) == "me"
        assert owner_of(*ends, {"nobody": 1 << 22}) == ""
