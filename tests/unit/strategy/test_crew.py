"""Replicas as threads: what they find in their thread, whose turn it is, how they meet, how they end together."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.crew import Crew, current_replica

DEADLINE_S = 20.0  # of any wait in a test; one that runs into it fails


@contextlib.contextmanager
def crew_of(size: int, first_replica: int = 0) -> Iterator[Crew]:
    crew = Crew([torch.device("cpu")] * size, first_replica)
    try:
        yield crew
    finally:
        crew.close()


@pytest.fixture
def crew() -> Iterator[Crew]:
    with crew_of(3) as made:
        yield made


def everywhere(crew: Crew, work: Callable[[int], Any]) -> list[Any]:
    return crew.run([functools.partial(work, replica) for replica in range(crew.size)])


def wait_for(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S), "it did not come"


# -- a step in each thread ------------------------------------------------------------------------------------------


def test_every_replica_runs_its_own_callable_in_a_thread_that_lasts(crew: Crew) -> None:
    def work(replica: int) -> tuple[int, int | None, int]:
        return 10 * replica, current_replica(), threading.get_ident()

    first, second = everywhere(crew, work), everywhere(crew, work)
    assert [(result, seat) for result, seat, _ in first] == [(0, 0), (10, 1), (20, 2)]
    assert first == second
    assert len({thread for *_, thread in first} | {threading.get_ident()}) == 4
    assert current_replica() is None


def test_threads_that_a_step_starts_are_no_replicas_of_the_crew(crew: Crew) -> None:
    def work(replica: int) -> str:
        answers = []

        def ask() -> None:
            with pytest.raises(ConfigurationError, match="outside strategy") as refused:
                crew.meet("a meeting", None, lambda values: values)
            answers.append(str(refused.value))

        thread = threading.Thread(target=contextvars.copy_context().run, args=(ask,))
        thread.start()
        thread.join()
        return answers[0]

    assert len(everywhere(crew, work)) == 3


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
def test_replicas_find_the_modes_of_the_caller(crew: Crew, mode: Callable[[], Any]) -> None:
    plain = _modes(0)
    with mode():
        token = _variable.set("set")
        try:
            expected = _modes(0)
            assert expected != plain
            assert everywhere(crew, _modes) == [expected] * 3
        finally:
            _variable.reset(token)
    assert everywhere(crew, _modes) == [plain] * 3


def test_what_a_step_sets_does_not_stay(crew: Crew) -> None:
    def work(replica: int) -> None:
        _variable.set(f"of replica {replica}")
        torch.set_grad_enabled(False)

    everywhere(crew, work)
    assert everywhere(crew, lambda _: (_variable.get(), torch.is_grad_enabled())) == [("unset", True)] * 3


def test_nothing_of_a_run_is_kept(crew: Crew) -> None:
    class Batch:
        pass

    batch = Batch()
    dead = weakref.ref(batch)
    results = everywhere(crew, functools.partial(lambda given, _: given, batch))
    assert results == [batch] * 3
    del results, batch
    gc.collect()
    assert dead() is None


def test_threads_end_with_a_crew_that_nobody_closed() -> None:
    crew = Crew([torch.device("cpu")] * 2)
    threads = crew._threads
    assert all(thread.is_alive() for thread in threads)
    del crew
    gc.collect()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_crew_refuses_what_it_cannot_run() -> None:
    with pytest.raises(ConfigurationError, match="got none"):
        Crew([])
    with crew_of(2) as crew:
        with pytest.raises(ConfigurationError, match="expected 2 callables, one for each replica, got 1"):
            crew.run([lambda: None])
        with pytest.raises(ConfigurationError, match="inside strategy"):
            everywhere(crew, lambda _: everywhere(crew, lambda _: None))
        with pytest.raises(ConfigurationError, match="inside strategy"):
            everywhere(crew, lambda _: crew.meet("a", 0, lambda values: everywhere(crew, lambda _: values[0])))
        with pytest.raises(ConfigurationError, match="a meeting outside strategy"):
            crew.meet("a meeting", None, lambda values: values)
    with pytest.raises(ConfigurationError, match="closed"):
        crew.run([lambda: None] * 2)


# -- turns ----------------------------------------------------------------------------------------------------------


def test_cpu_replicas_run_in_turn_and_pass_the_baton_where_they_wait(crew: Crew) -> None:
    events: list[str] = []
    last_came = threading.Event()

    def work(replica: int) -> None:
        events.append(f"{replica} begins")
        if replica == 2:
            last_came.set()
        else:
            with crew.waiting(), crew.waiting():  # the inner one changes nothing
                wait_for(last_came)
        events.append(f"{replica} ends")

    everywhere(crew, work)
    # Those that waited go on when the last one has ended, the lowest of them that has noticed first.
    assert events[:4] == ["0 begins", "1 begins", "2 begins", "2 ends"]
    assert sorted(events[4:]) == ["0 ends", "1 ends"]


def test_one_replica_computes_at_a_time(crew: Crew) -> None:
    busy = threading.Lock()
    num_turns = 0

    def work(replica: int) -> None:
        nonlocal num_turns
        for _ in range(30):
            assert busy.acquire(blocking=False), "two replicas run at once"
            num_turns += 1
            busy.release()
            with crew.waiting():
                pass
            crew.meet("a meeting", replica, lambda values: values)

    everywhere(crew, work)
    assert num_turns == 90


# -- random numbers -------------------------------------------------------------------------------------------------


def draw(crew: Crew, replica: int) -> list[float]:
    first = torch.rand(2).tolist()
    crew.meet("a meeting", None, lambda values: values)
    with crew.waiting():
        pass
    return [*first, *torch.rand(2).tolist()]


def test_random_numbers_repeat_whoever_waits_for_whom(crew: Crew) -> None:
    def two_runs() -> list[list[list[float]]]:
        torch.manual_seed(5)
        return [everywhere(crew, functools.partial(draw, crew)) for _ in range(2)]

    once, again = two_runs(), two_runs()
    assert once == again
    numbers = [number for run in once for replica in run for number in replica]
    assert len(set(numbers)) == len(numbers) == 24, "replicas drew the same"
    with crew_of(3) as other:
        torch.manual_seed(5)
        assert everywhere(other, functools.partial(draw, other)) == once[0]


def test_replica_0_and_the_caller_draw_from_one_stream(crew: Crew) -> None:
    torch.manual_seed(6)
    expected = torch.rand(6).tolist()
    torch.manual_seed(6)
    ahead = torch.rand(1).item()
    (first, *_) = everywhere(crew, functools.partial(draw, crew))
    assert [ahead, *first, torch.rand(1).item()] == expected


def test_the_caller_draws_in_a_meeting_as_outside(crew: Crew) -> None:
    torch.manual_seed(7)
    expected = torch.rand(2).tolist()

    def work(replica: int) -> tuple[float, float]:
        drawn = crew.meet("a meeting", None, lambda values: [torch.rand(1).item()] * 3)
        return drawn, torch.rand(1).item()

    torch.manual_seed(7)
    (first, *_) = everywhere(crew, work)
    assert list(first) == expected


def test_a_seed_set_in_a_step_holds_in_the_next_one(crew: Crew) -> None:
    def expected(replica: int) -> list[float]:
        torch.manual_seed(100 + replica)
        return [torch.rand(1).item(), torch.rand(1).item()]

    wanted = [expected(replica) for replica in range(3)]
    first = everywhere(crew, lambda replica: (torch.manual_seed(100 + replica), torch.rand(1).item())[1])
    second = everywhere(crew, lambda _: torch.rand(1).item())
    assert [list(pair) for pair in zip(first, second, strict=True)] == wanted


# -- meetings -------------------------------------------------------------------------------------------------------


def test_a_meeting_is_decided_once_by_the_caller(crew: Crew) -> None:
    decided_by: list[tuple[int, int | None]] = []

    def decide(values: list[int]) -> list[str]:
        decided_by.append((threading.get_ident(), current_replica()))
        return [f"{value} of {sum(values)}" for value in values]

    def work(replica: int) -> list[str]:
        return [crew.meet("a meeting", 10 * round_ + replica, decide) for round_ in range(50)]

    for replica, results in enumerate(everywhere(crew, work)):
        assert results == [f"{10 * round_ + replica} of {30 * round_ + 3}" for round_ in range(50)]
    assert decided_by == [(threading.get_ident(), None)] * 50


def test_an_error_in_a_meeting_is_raised_as_it_is(crew: Crew) -> None:
    ends: list[str] = []

    def decide(values: list[Any]) -> list[Any]:
        raise KeyError("no such thing")

    def work(replica: int) -> None:
        try:
            crew.meet("a meeting about nothing", None, decide)
        except CollectiveError as error:
            ends.append(str(error))
            raise

    with pytest.raises(KeyError, match="no such thing") as raised:
        everywhere(crew, work)
    assert raised.value.__notes__ == ["raised in a meeting about nothing, where all replicas had met"]
    assert ends == ["this replica has to end: the caller of the replicas raised KeyError: 'no such thing'"] * 3
    assert everywhere(crew, lambda replica: crew.meet("another", replica, lambda values: values)) == [0, 1, 2]


def test_an_interrupt_of_the_caller_ends_all_replicas(crew: Crew) -> None:
    def interrupted(values: list[Any]) -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everywhere(crew, lambda _: crew.meet("a meeting", None, interrupted))
    assert everywhere(crew, lambda replica: replica) == [0, 1, 2]


def test_a_replica_that_returns_early_is_named() -> None:
    with crew_of(2, first_replica=4) as crew:

        def work(replica: int) -> None:
            crew.meet("the first", None, lambda values: values)
            if replica == 0:
                crew.meet("the second", None, lambda values: values)

        with pytest.raises(CollectiveError) as raised:
            everywhere(crew, work)
        assert str(raised.value) == (
            "replica 4 is at meeting 2 of this step (the second), but replica 5 has ended its step after 1 meeting: "
            "every replica has to make the same calls in the same order"
        )
        assert raised.value.rank == 5


def test_replicas_at_different_meetings_are_named(crew: Crew) -> None:
    def work(replica: int) -> None:
        crew.meet("a sum" if replica == 2 else "a product", None, lambda values: values)

    with pytest.raises(CollectiveError, match=r"replica 0 is at .*a product\), but replica 2 is at .*a sum"):
        everywhere(crew, work)
    assert everywhere(crew, lambda replica: replica) == [0, 1, 2]


# -- failures -------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """What a step raises."""


def test_the_error_of_a_replica_is_raised_with_its_number() -> None:
    def work(replica: int) -> int:
        if replica == 1:
            raise Broken("no luck")
        return replica

    with crew_of(3, first_replica=3) as crew:
        for _ in range(2):
            with pytest.raises(Broken, match="no luck") as raised:
                everywhere(crew, work)
            assert raised.value.__notes__ == ["raised in replica 4 (cpu)"]


def test_an_error_is_noted_once_even_if_it_is_raised_again(crew: Crew) -> None:
    error = Broken("always the same")

    def work(replica: int) -> None:
        raise error

    for _ in range(2):
        with pytest.raises(Broken) as raised:
            everywhere(crew, work)
        assert raised.value.__notes__ == ["raised in replica 0 (cpu)"]


def test_an_error_wakes_those_who_wait_and_stops_those_who_have_not_begun(crew: Crew) -> None:
    began: list[int] = []
    ended_by: list[str] = []
    never = threading.Event()

    def work(replica: int) -> None:
        began.append(replica)
        if replica == 1:
            raise Broken
        try:
            crew.meet("a meeting", None, lambda values: values)
        except CollectiveError as error:
            ended_by.append(str(error))
            raise
        wait_for(never)

    with pytest.raises(Broken):
        everywhere(crew, work)
    assert began == [0, 1]
    assert ended_by == ["this replica has to end: replica 1 raised Broken: "]


def test_who_swallows_the_news_of_a_failure_hears_it_again(crew: Crew) -> None:
    heard: list[int] = []

    def work(replica: int) -> None:
        if replica == 1:
            raise Broken
        for _ in range(3):
            try:
                with crew.waiting():
                    pass
                crew.meet("a meeting", None, lambda values: values)
            except CollectiveError:
                heard.append(replica)

    with pytest.raises(Broken):
        everywhere(crew, work)
    assert heard == [0, 0, 0]


def test_listeners_hear_of_a_failure_once(crew: Crew) -> None:
    heard: list[str] = []
    crew.on_abort.append(heard.append)

    def work(replica: int) -> None:
        crew.meet("a meeting", None, lambda values: values)
        raise Broken(f"first line of {replica}\nsecond line")

    with pytest.raises(Broken):
        everywhere(crew, work)
    assert len(heard) == 1
    assert heard[0] in [f"replica {replica} raised Broken: first line of {replica}" for replica in range(3)]


def test_the_streams_of_the_replicas_go_on_where_they_were() -> None:
    with crew_of(3) as first:
        torch.manual_seed(7)
        everywhere(first, lambda _: torch.rand(2))
        generator, streams = torch.get_rng_state(), first.random_states()
        expected = everywhere(first, lambda _: torch.rand(2))
    assert not torch.equal(expected[1], expected[2])
    with crew_of(3) as second:
        torch.manual_seed(8)
        everywhere(second, lambda _: torch.rand(5))
        torch.set_rng_state(generator)
        second.set_random_states(streams)
        found = everywhere(second, lambda _: torch.rand(2))
    assert all(map(torch.equal, found, expected))


def test_streams_of_other_replicas_are_left_out() -> None:
    with crew_of(2) as two:
        everywhere(two, lambda _: torch.rand(2))
        streams = two.random_states()

    def drawn(given: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
        with crew_of(3) as three:
            torch.manual_seed(7)
            if given is not None:
                three.set_random_states(given)
            return list(everywhere(three, lambda _: torch.rand(2)))

    assert all(map(torch.equal, drawn(streams), drawn(None)))
