"""Replicas as threads: what they find in their thread, whose turn it is, how they meet, how they end together."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.replica_threads import ReplicaThreads, current_replica

DEADLINE_S = 60.0  # of any wait in a test; one that runs into it fails


@contextlib.contextmanager
def crew_of(size: int, first_replica: int = 0) -> Iterator[ReplicaThreads]:
    replica_threads = ReplicaThreads([torch.device("cpu")] * size, first_replica)
    try:
        yield replica_threads
    finally:
        replica_threads.close()


@pytest.fixture
def replica_threads() -> Iterator[ReplicaThreads]:
    with crew_of(3) as made:
        yield made


def everywhere(replica_threads: ReplicaThreads, work: Callable[[int], Any]) -> list[Any]:
    return replica_threads.run([functools.partial(work, replica) for replica in range(replica_threads.size)])


def wait_for(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S), "it did not come"


# -- a step in each thread ------------------------------------------------------------------------------------------


def test_every_replica_runs_its_own_callable_in_a_thread_that_lasts(replica_threads: ReplicaThreads) -> None:
    def work(replica: int) -> tuple[int, int | None, int]:
        return 10 * replica, current_replica(), threading.get_ident()

    first, second = everywhere(replica_threads, work), everywhere(replica_threads, work)
    assert [(result, seat) for result, seat, _ in first] == [(0, 0), (10, 1), (20, 2)]
    assert first == second
    assert len({thread for *_, thread in first} | {threading.get_ident()}) == 4
    assert current_replica() is None


def test_threads_that_a_step_starts_are_no_replicas_of_the_crew(replica_threads: ReplicaThreads) -> None:
    def work(replica: int) -> str:
        answers = []

        def ask() -> None:
            with pytest.raises(ConfigurationError, match="outside strategy") as refused:
                replica_threads.meet("a meeting", None, lambda values: values)
            answers.append(str(refused.value))

        thread = threading.Thread(target=contextvars.copy_context().run, args=(ask,))
        thread.start()
        thread.join()
        return answers[0]

    assert len(everywhere(replica_threads, work)) == 3


_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def _modes(_: int) -> tuple[Any, ...]:
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        product.dtype,
        product.device.type,
        _variable.get(),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(torch.device, "meta"),
    ],
    ids=["none", "no_grad", "inference", "autocast", "device"],
)
def test_replicas_find_the_modes_of_the_caller(replica_threads: ReplicaThreads, mode: Callable[[], Any]) -> None:
    plain = _modes(0)
    with mode():
        token = _variable.set("set")
        try:
            expected = _modes(0)
            assert expected != plain
            assert everywhere(replica_threads, _modes) == [expected] * 3
        finally:
            _variable.reset(token)
    assert everywhere(replica_threads, _modes) == [plain] * 3


def test_what_a_step_sets_does_not_stay(replica_threads: ReplicaThreads) -> None:
    def work(replica: int) -> None:
        _variable.set(f"of replica {replica}")
        torch.set_grad_enabled(False)

    everywhere(replica_threads, work)
    assert everywhere(replica_threads, lambda _: (_variable.get(), torch.is_grad_enabled())) == [("unset", True)] * 3


def test_nothing_of_a_run_is_kept(replica_threads: ReplicaThreads) -> None:
    class Batch:
        pass

    batch = Batch()
    dead = weakref.ref(batch)
    results = everywhere(replica_threads, functools.partial(lambda given, _: given, batch))
    assert results == [batch] * 3
    del results, batch
    gc.collect()
    assert dead() is None


def test_threads_end_with_a_crew_that_nobody_closed() -> None:
    replica_threads = ReplicaThreads([torch.device("cpu")] * 2)
    threads = replica_threads._threads
    assert all(thread.is_alive() for thread in threads)
    del replica_threads
    gc.collect()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_crew_refuses_what_it_cannot_run() -> None:
    with crew_of(2) as replica_threads:
        with pytest.raises(ConfigurationError, match="inside strategy"):
            everywhere(replica_threads, lambda _: everywhere(replica_threads, lambda _: None))
        with pytest.raises(ConfigurationError, match="inside strategy"):
            everywhere(
                replica_threads,
                lambda _: replica_threads.meet("a", 0, lambda values: everywhere(replica_threads, lambda _: values[0])),
            )
        with pytest.raises(ConfigurationError, match="a meeting outside strategy"):
            replica_threads.meet("a meeting", None, lambda values: values)
    with pytest.raises(ConfigurationError, match="closed"):
        replica_threads.run([lambda: None] * 2)


# -- turns ----------------------------------------------------------------------------------------------------------


def test_cpu_replicas_run_in_turn_and_pass_the_baton_where_they_wait(replica_threads: ReplicaThreads) -> None:
    events: list[str] = []
    last_came = threading.Event()

    def work(replica: int) -> None:
        events.append(f"{replica} begins")
        if replica == 2:
            last_came.set()
        else:
            with replica_threads.waiting(), replica_threads.waiting():  # the inner one changes nothing
                wait_for(last_came)
        events.append(f"{replica} ends")

    everywhere(replica_threads, work)
    # Those that waited go on when the last one has ended, the lowest of them that has noticed first.
    assert events[:4] == ["0 begins", "1 begins", "2 begins", "2 ends"]
    assert sorted(events[4:]) == ["0 ends", "1 ends"]


def test_one_replica_computes_at_a_time(replica_threads: ReplicaThreads) -> None:
    busy = threading.Lock()
    num_turns = 0

    def work(replica: int) -> None:
        nonlocal num_turns
        for _ in range(30):
            assert busy.acquire(blocking=False), "two replicas run at once"
            num_turns += 1
            busy.release()
            with replica_threads.waiting():
                pass
            replica_threads.meet("a meeting", replica, lambda values: values)

    everywhere(replica_threads, work)
    assert num_turns == 90


# -- random numbers -------------------------------------------------------------------------------------------------


def draw(replica_threads: ReplicaThreads, replica: int) -> list[float]:
    first = torch.rand(2).tolist()
    replica_threads.meet("a meeting", None, lambda values: values)
    with replica_threads.waiting():
        pass
    return [*first, *torch.rand(2).tolist()]


def test_random_numbers_repeat_whoever_waits_for_whom(replica_threads: ReplicaThreads) -> None:
    def two_runs() -> list[list[list[float]]]:
        torch.manual_seed(5)
        return [everywhere(replica_threads, functools.partial(draw, replica_threads)) for _ in range(2)]

    once, again = two_runs(), two_runs()
    assert once == again
    numbers = [number for run in once for replica in run for number in replica]
    assert len(set(numbers)) == len(numbers) == 24, "replicas drew the same"
    with crew_of(3) as other:
        torch.manual_seed(5)
        assert everywhere(other, functools.partial(draw, other)) == once[0]


def test_replica_0_and_the_caller_draw_from_one_stream(replica_threads: ReplicaThreads) -> None:
    torch.manual_seed(6)
    expected = torch.rand(6).tolist()
    torch.manual_seed(6)
    ahead = torch.rand(1).item()
    (first, *_) = everywhere(replica_threads, functools.partial(draw, replica_threads))
    assert [ahead, *first, torch.rand(1).item()] == expected


def test_the_caller_draws_in_a_meeting_as_outside(replica_threads: ReplicaThreads) -> None:
    torch.manual_seed(7)
    expected = torch.rand(2).tolist()

    def work(replica: int) -> tuple[float, float]:
        drawn = replica_threads.meet("a meeting", None, lambda values: [torch.rand(1).item()] * 3)
        return drawn, torch.rand(1).item()

    torch.manual_seed(7)
    (first, *_) = everywhere(replica_threads, work)
    assert list(first) == expected


def test_a_seed_set_in_a_step_holds_in_the_next_one(replica_threads: ReplicaThreads) -> None:
    def expected(replica: int) -> list[float]:
        torch.manual_seed(100 + replica)
        return [torch.rand(1).item(), torch.rand(1).item()]

    wanted = [expected(replica) for replica in range(3)]
    first = everywhere(replica_threads, lambda replica: (torch.manual_seed(100 + replica), torch.rand(1).item())[1])
    second = everywhere(replica_threads, lambda _: torch.rand(1).item())
    assert [list(pair) for pair in zip(first, second, strict=True)] == wanted


# -- meetings -------------------------------------------------------------------------------------------------------


def test_a_meeting_is_decided_once_by_the_caller(replica_threads: ReplicaThreads) -> None:
    decided_by: list[tuple[int, int | None]] = []

    def decide(values: list[int]) -> list[str]:
        decided_by.append((threading.get_ident(), current_replica()))
        return [f"{value} of {sum(values)}" for value in values]

    def work(replica: int) -> list[str]:
        return [replica_threads.meet("a meeting", 10 * round_ + replica, decide) for round_ in range(50)]

    for replica, results in enumerate(everywhere(replica_threads, work)):
        assert results == [f"{10 * round_ + replica} of {30 * round_ + 3}" for round_ in range(50)]
    assert decided_by == [(threading.get_ident(), None)] * 50


def test_an_error_in_a_meeting_is_raised_as_it_is(replica_threads: ReplicaThreads) -> None:
    ends: list[str] = []

    def decide(values: list[Any]) -> list[Any]:
        raise KeyError("no such thing")

    def work(replica: int) -> None:
        try:
            replica_threads.meet("a meeting about nothing", None, decide)
        except CollectiveError as error:
            ends.append(str(error))
            raise

    with pytest.raises(KeyError, match="no such thing") as raised:
        everywhere(replica_threads, work)
    assert raised.value.__notes__ == ["raised in a meeting about nothing, where all replicas had met"]
    assert ends == ["this replica has to stop: the caller of the replicas raised KeyError: 'no such thing'"] * 3
    assert everywhere(
        replica_threads, lambda replica: replica_threads.meet("another", replica, lambda values: values)
    ) == [0, 1, 2]


def test_an_interrupt_of_the_caller_ends_all_replicas(replica_threads: ReplicaThreads) -> None:
    def interrupted(values: list[Any]) -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everywhere(replica_threads, lambda _: replica_threads.meet("a meeting", None, interrupted))
    assert everywhere(replica_threads, lambda replica: replica) == [0, 1, 2]


def test_a_replica_that_returns_early_is_named() -> None:
    with crew_of(2, first_replica=4) as replica_threads:

        def work(replica: int) -> None:
            replica_threads.meet("the first", None, lambda values: values)
            if replica == 0:
                replica_threads.meet("the second", None, lambda values: values)

        with pytest.raises(CollectiveError) as raised:
            everywhere(replica_threads, work)
        assert str(raised.value) == (
            "replica 4 is at synchronization point 2 of this step (the second), but replica 5 has ended its step after "
            "1 synchronization point: every replica has to make the same calls in the same order"
        )
        assert raised.value.rank == 5


def test_replicas_at_different_meetings_are_named(replica_threads: ReplicaThreads) -> None:
    def work(replica: int) -> None:
        replica_threads.meet("a sum" if replica == 2 else "a product", None, lambda values: values)

    with pytest.raises(CollectiveError, match=r"replica 0 is at .*a product\), but replica 2 is at .*a sum"):
        everywhere(replica_threads, work)
    assert everywhere(replica_threads, lambda replica: replica) == [0, 1, 2]


# -- failures -------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """What a step raises."""


def test_the_error_of_a_replica_is_raised_with_its_number() -> None:
    def work(replica: int) -> int:
        if replica == 1:
            raise Broken("no luck")
        return replica

    with crew_of(3, first_replica=3) as replica_threads:
        for _ in range(2):
            with pytest.raises(Broken, match="no luck") as raised:
                everywhere(replica_threads, work)
            assert raised.value.__notes__ == ["raised in replica 4 (cpu)"]


def test_an_error_is_noted_once_even_if_it_is_raised_again(replica_threads: ReplicaThreads) -> None:
    error = Broken("always the same")

    def work(replica: int) -> None:
        raise error

    for _ in range(2):
        with pytest.raises(Broken) as raised:
            everywhere(replica_threads, work)
        assert raised.value.__notes__ == ["raised in replica 0 (cpu)"]


def test_an_error_wakes_those_who_wait_and_stops_those_who_have_not_begun(replica_threads: ReplicaThreads) -> None:
    began: list[int] = []
    ended_by: list[str] = []
    never = threading.Event()

    def work(replica: int) -> None:
        began.append(replica)
        if replica == 1:
            raise Broken
        try:
            replica_threads.meet("a meeting", None, lambda values: values)
        except CollectiveError as error:
            ended_by.append(str(error))
            raise
        wait_for(never)

    with pytest.raises(Broken):
        everywhere(replica_threads, work)
    assert began == [0, 1]
    assert ended_by == ["this replica has to stop: replica 1 raised Broken: "]


def test_who_swallows_the_news_of_a_failure_hears_it_again(replica_threads: ReplicaThreads) -> None:
    heard: list[int] = []

    def work(replica: int) -> None:
        if replica == 1:
            raise Broken
        for _ in range(3):
            try:
                with replica_threads.waiting():
                    pass
                replica_threads.meet("a meeting", None, lambda values: values)
            except CollectiveError:
                heard.append(replica)

    with pytest.raises(Broken):
        everywhere(replica_threads, work)
    assert heard == [0, 0, 0]


def test_listeners_hear_of_a_failure_once(replica_threads: ReplicaThreads) -> None:
    heard: list[str] = []
    replica_threads.on_abort.append(heard.append)

    def work(replica: int) -> None:
        replica_threads.meet("a meeting", None, lambda values: values)
        raise Broken(f"first line of {replica}\nsecond line")

    with pytest.raises(Broken):
        everywhere(replica_threads, work)
    assert len(heard) == 1
    assert heard[0] in [f"replica {replica} raised Broken: first line of {replica}" for replica in range(3)]


def test_the_streams_of_the_replicas_go_on_where_they_were() -> None:
    with crew_of(3) as first:
        torch.manual_seed(7)
        everywhere(first, lambda _: torch.rand(2))
        generator, streams = torch.get_rng_state(), first.turn_lock.states()
        expected = everywhere(first, lambda _: torch.rand(2))
    assert not torch.equal(expected[1], expected[2])
    with crew_of(3) as second:
        torch.manual_seed(8)
        everywhere(second, lambda _: torch.rand(5))
        torch.set_rng_state(generator)
        second.turn_lock.set_states(streams)
        found = everywhere(second, lambda _: torch.rand(2))
    assert all(map(torch.equal, found, expected))


def test_streams_of_other_replicas_are_left_out() -> None:
    with crew_of(2) as two:
        everywhere(two, lambda _: torch.rand(2))
        streams = two.turn_lock.states()

    def drawn(given: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
        with crew_of(3) as three:
            torch.manual_seed(7)
            if given is not None:
                three.turn_lock.set_states(given)
            return list(everywhere(three, lambda _: torch.rand(2)))

    assert all(map(torch.equal, drawn(streams), drawn(None)))


@pytest.mark.thorough
def test_nobody_wakes_replicas_when_the_interpreter_ends() -> None:
    """Where one ends beside it, with tasks of a failed backward, torch ends the process (SIGABRT)."""
    program = (
        "import atexit\n"
        "atexit.register(lambda: (replicas._threads[0].join(0.5), print(replicas._threads[0].is_alive())))\n"
        "import torch\n"
        "from stratagem.strategy.replicas.replica_threads import ReplicaThreads\n"
        "replicas = ReplicaThreads([torch.device('cpu')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("at", ["the start", "a meeting"])
def test_an_interrupt_beside_the_step_leaves_replicas_that_can_run_again(
    replica_threads: ReplicaThreads, at: str
) -> None:
    """The turn was never given back: all waited for ever, or the next run was taken for one inside of this one."""

    def interrupted(values: list[Any]) -> Iterator[Any]:
        yield from values[1:]
        raise KeyboardInterrupt

    def work(replica: int) -> Any:
        return replica_threads.meet("here", replica, interrupted)  # type: ignore[arg-type]

    each = [functools.partial(work, replica) for replica in range(3)]
    with pytest.raises(KeyboardInterrupt):
        replica_threads.run(interrupted(each) if at == "the start" else each)  # type: ignore[arg-type]
    assert everywhere(replica_threads, lambda replica: replica) == [0, 1, 2]


def test_an_interrupt_at_the_end_of_a_run_ends_it(
    replica_threads: ReplicaThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later run was refused as one inside of this one."""
    finish = replica_threads.turn_lock.finish

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):

        def finished() -> None:
            finish()
            patched.setattr(type(replica_threads.changed), "__enter__", interrupted)

        patched.setattr(replica_threads.turn_lock, "finish", finished)
        everywhere(replica_threads, lambda replica: replica)
    assert everywhere(replica_threads, lambda replica: replica) == [0, 1, 2]


def test_an_interrupt_while_streams_are_seeded_has_them_seeded_again(
    replica_threads: ReplicaThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run found no stream of a replica: KeyError."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch, "randint", interrupted)
        everywhere(replica_threads, lambda replica: replica)
    assert everywhere(replica_threads, lambda replica: replica) == [0, 1, 2]
