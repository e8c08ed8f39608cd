"""What a worker asks for when it takes newer weights of everything that it has prepared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.strategy.ps.variables import VariableGroups
from stratagem.worker.gradient_guard import GradientPolicy
from stratagem.worker.push.ps_client import PsClient
from tests.contract.ps.test_tables import Job, start

__all__ = ["start"]


def prepare(groups: VariableGroups, seed: int) -> list[nn.Linear]:
    """Three models, each with an optimizer of its own, of another dtype than the model before."""
    torch.manual_seed(seed)
    models = [nn.Linear(3, 2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
    for model in models:
        groups.create([model], [torch.optim.SGD(model.parameters(), 0.1)], GradientPolicy(), lambda: None)
    return models


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_each_ps_is_asked_once_for_all_models(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    job = start(transport)
    trained, taker = prepare(job.groups, 1), VariableGroups(job.groups._runtime, None)
    copies = prepare(taker, 2)
    job.pushes += [job.groups.pushes[0], job.groups.pushes[2]]
    for _ in range(2):
        for model in (trained[0], trained[2]):
            model(torch.ones(1, 3)).sum().backward()
        job.step()
    asked: Counter[tuple[str, str]] = Counter()
    begin = PsClient.start

    def counted(client: PsClient, method: str, *arguments: Any, **options: Any) -> Any:
        asked[client.task, method] += 1
        return begin(client, method, *arguments, **options)

    monkeypatch.setattr(PsClient, "start", counted)
    assert taker.num_updates == 0
    taker.pull()
    assert asked == {("ps:0", "PullWeights"): 1, ("ps:1", "PullWeights"): 1}
    assert [variables.num_updates for variables in taker._all] == [2, 0, 2]
    for model, copy in zip(trained, copies, strict=True):
        for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
            assert torch.equal(ours, theirs)
