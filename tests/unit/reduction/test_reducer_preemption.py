"""A rank that has been asked to end says so in its backward, and all ranks know after the same one."""

from __future__ import annotations

import torch

from stratagem.worker.interrupts import PreemptionRequest
from stratagem.worker.ring.communicator import Communicator
from tests.unit.reduction.reducing import batch, build, mean_loss, reducing, share_of, weight_of
from tests.unit.ring.thread_group import run_ranks

SHARES = [2, 1, 1]


def asked() -> PreemptionRequest:
    """One that looks as after a signal."""
    request = PreemptionRequest()
    request.requested = True
    return request


def test_all_ranks_hear_in_the_same_backward() -> None:
    requests = [PreemptionRequest() for _ in SHARES]

    def work(communicator: Communicator) -> list[bool]:
        request = requests[communicator.rank]
        model, known = build(), []
        with reducing(model, communicator, weight_of(SHARES, communicator.rank), request=request):
            for step in range(4):
                request.requested = communicator.rank == 1 and step == 2
                mean_loss(model, *share_of(batch(step), SHARES, communicator.rank)).backward()
                known.append(request.is_due(communicator))
        return known

    assert run_ranks(len(SHARES), work) == [[False, False, True, True]] * 3
    assert [request.requested for request in requests] == [False] * 3


def test_gradients_that_wait_do_not_tell_and_the_reduction_does() -> None:
    def work(communicator: Communicator) -> tuple[bool, bool]:
        request = asked() if communicator.rank == 2 else PreemptionRequest()
        model = build()
        with reducing(model, communicator, weight_of(SHARES, communicator.rank), request=request) as reducer:
            with reducer.no_sync():
                mean_loss(model, *share_of(batch(0), SHARES, communicator.rank)).backward()
            early = request.is_due(communicator)
            mean_loss(model, *share_of(batch(1), SHARES, communicator.rank)).backward()
            return early, request.is_due(communicator)

    assert run_ranks(len(SHARES), work) == [(False, True)] * 3


def test_ranks_agree_without_a_backward() -> None:
    def work(communicator: Communicator) -> tuple[bool, bool]:
        request = PreemptionRequest()
        first = request.agree(communicator)
        request.requested = communicator.rank == 0
        return first, request.agree(communicator)

    assert run_ranks(2, work) == [(False, True)] * 2


def test_a_request_changes_no_gradient() -> None:
    def work(communicator: Communicator, request: PreemptionRequest) -> list[torch.Tensor]:
        model = build()
        with reducing(model, communicator, weight_of(SHARES, communicator.rank), request=request):
            mean_loss(model, *share_of(batch(0), SHARES, communicator.rank)).backward()
            return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = run_ranks(3, lambda communicator: work(communicator, PreemptionRequest()))
    told = run_ranks(3, lambda communicator: work(communicator, asked()))
    assert len(plain[0]) == 7
    for one, other in zip(plain[0], told[2], strict=True):
        assert torch.equal(one, other)


def test_a_request_needs_somebody_who_watches_and_counts_once() -> None:
    request = PreemptionRequest()
    assert not request.request()
    request.watch(60.0)
    request.watch(60.0)
    asked_twice = request.request(), request.request()  # the second one ends the process
    assert asked_twice == (True, False)
    left = request.unwatch(), request.unwatch()  # nobody has followed it
    assert left == (False, True) and not request.requested
    request.watch(60.0)
    assert request.request()
    request.leave()
    assert not request.unwatch() and request.is_leaving
