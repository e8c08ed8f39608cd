"""What a ps has in flight: bounded by the weights, however many workers there are, and nobody waits for ever."""

from __future__ import annotations

import random
import time
import weakref
from typing import Any

import pytest
import torch

from stratagem.cluster.units import Unit
from stratagem.ps import state as ps_state
from stratagem.ps import variables
from stratagem.ps import waiting as ps_waiting
from stratagem.ps.requests import FrameKind, Sender
from stratagem.ps.staging import FRAME_OVERHEAD_BYTES, Staging
from stratagem.ps.store import Store
from stratagem.rpc.codec import Frame
from stratagem.rpc.generated import frame_pb2
from tests.polling import until
from tests.unit.ps.driver import CALL, DirectWorker, in_thread, make_spec

NUM_FRAMES, FRAME_ELEMENTS = 12, 1000
FRAME_BYTES = 4 * FRAME_ELEMENTS + FRAME_OVERHEAD_BYTES
WEIGHTS_BYTES = NUM_FRAMES * FRAME_BYTES


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6])
def test_two_gradients_have_room_and_every_one_becomes_complete(num_workers: int) -> None:
    """Frames come in any order, and a gradient that is complete goes at any later moment."""
    for seed in range(20):
        script, staging, spec = random.Random(seed), Staging(), make_spec([(NUM_FRAMES * FRAME_ELEMENTS,)])
        senders = [Sender(f"worker:{index}", 1) for index in range(num_workers)]
        come, done, refused = dict.fromkeys(senders, 0), dict.fromkeys(senders, 0), 0
        piece = torch.zeros(FRAME_ELEMENTS)
        while min(done.values()) < 3:
            sender = script.choice(senders)
            if come[sender] == NUM_FRAMES:
                staging.drop(sender, done[sender] + 1, [1])
                come[sender], done[sender] = 0, done[sender] + 1
            elif staging.has_room(sender, FRAME_BYTES, WEIGHTS_BYTES):
                offset = come[sender] * FRAME_ELEMENTS
                staging.add(sender, FrameKind.GRADIENT, done[sender] + 1, spec, offset, piece)
                come[sender] += 1
                refused = 0
            else:
                refused += 1
                assert num_workers > 2 and refused < 1000, "somebody can always go on"
            num_staged = sum(come.values())
            assert num_staged * FRAME_BYTES <= 2 * WEIGHTS_BYTES


def three_workers() -> tuple[Store, list[DirectWorker]]:
    store = Store()
    workers = [DirectWorker(store, f"worker:{index}", make_spec([(10,)])) for index in range(3)]
    for worker in workers:
        worker.create(torch.zeros(10))
    return store, workers


def test_a_frame_waits_until_another_senders_update_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_state, "MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(ps_waiting, "ROOM_S", 60.0)
    monkeypatch.setattr(variables, "MIN_AWAITED_BYTES", 0)
    store, workers = three_workers()
    for worker in workers[:2]:
        worker.stage(torch.ones(10))
    frame = Frame(frame_pb2.GRADIENT, 1, 1, 0, torch.ones(10))
    started = time.monotonic()
    waiting = in_thread(lambda: store.variables.stage(workers[2].sender, FrameKind.GRADIENT, frame, CALL))
    until(lambda: waiting.done or time.monotonic() > started + 0.1)
    assert not waiting.done
    workers[0].commit(torch.ones(10), Unit(1, 0, 0))
    waiting.result()
    assert store.state.staging.num_frames(workers[2].sender, 1) == 1


def test_who_has_waited_long_enough_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that is stopped with a gradient here holds nobody up for good."""
    monkeypatch.setattr(ps_state, "MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(ps_waiting, "ROOM_S", 0.05)
    monkeypatch.setattr(variables, "MIN_AWAITED_BYTES", 0)
    store, workers = three_workers()
    for worker in workers[:2]:
        worker.stage(torch.ones(10))
    frame = Frame(frame_pb2.GRADIENT, 1, 1, 0, torch.ones(10))
    store.variables.stage(workers[2].sender, FrameKind.GRADIENT, frame, CALL)
    assert store.state.staging.num_frames(workers[2].sender, 1) == 1


def test_a_gradient_is_free_when_its_room_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the room takes as much memory, at once."""
    store, (worker, *_) = three_workers()
    reference = worker.stage(torch.ones(10))
    ((_, piece),) = store.state.staging.parts(worker.sender, reference.transfer, 1)
    staged, drop, left = weakref.ref(piece), store.state.staging.drop, []
    del piece

    def dropped(*arguments: Any) -> None:
        drop(*arguments)
        left.append(staged())

    monkeypatch.setattr(store.state.staging, "drop", dropped)
    worker.send(worker.request(reference, [Unit(1, 0, 0)]))
    assert left == [None]


def test_the_room_of_a_gradient_is_taken_by_the_weights_that_answer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_state, "MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(ps_waiting, "ROOM_S", 60.0)
    monkeypatch.setattr(variables, "MIN_AWAITED_BYTES", 0)
    store, workers = three_workers()
    reference, _ = workers[0].stage(torch.ones(10)), workers[1].stage(torch.ones(10))
    frame = Frame(frame_pb2.GRADIENT, 1, 1, 0, torch.ones(10))
    hold, waiting = workers[0].lane.hold, []

    def held(*arguments: Any) -> Any:
        waiting.append(in_thread(lambda: store.variables.stage(workers[2].sender, FrameKind.GRADIENT, frame, CALL)))
        started = time.monotonic()
        until(lambda: waiting[0].done or time.monotonic() > started + 0.1)
        assert not waiting[0].done
        return hold(*arguments)

    monkeypatch.setattr(workers[0].lane, "hold", held)
    workers[0].send(workers[0].request(reference, [Unit(1, 0, 0)]))
    waiting[0].result()
