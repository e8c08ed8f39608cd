"""What a worker asks for when it takes newer weights of everything that it has prepared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.ps.variables import VariableGroups
from stratagem.worker.gradient_guard import GradientPolicy
from stratagem.worker.push.ps_client import PsClient
from tests.contract.ps.test_tables import Job, start
from tests.unit.ps.driver import save_all

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


def trained_with(job: Job, groups: VariableGroups, model: nn.Linear, number: int) -> None:
    job.pushes[:] = [groups.pushes[number]]
    model(torch.ones(1, 3)).sum().backward()
    job.step()


def test_what_a_script_has_changed_stays_while_the_ps_have_no_updates_of_it(start: Callable[..., Job]) -> None:
    """The best weights of a model whose training is over: the next model's was refused when an epoch of it ended."""
    job = start("tcp")
    trained, other = prepare(job.groups, 1), VariableGroups(job.groups._runtime, None)
    copies = prepare(other, 2)
    trained_with(job, job.groups, trained[0], 0)
    nn.init.ones_(trained[0].weight)
    for _ in range(2):
        trained_with(job, other, copies[2], 2)
        job.groups.pull()
        assert torch.equal(trained[2].weight, copies[2].weight) and bool((trained[0].weight == 1).all())
    job.groups.check([*trained[1].parameters(), *trained[2].parameters()])
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"^weight was changed here"):
            job.groups.check([*trained[0].parameters()])
    other.pull()
    trained_with(job, other, copies[0], 0)
    with pytest.raises(ConfigurationError, match=r"^weight was changed here"):
        job.groups.pull()
    job.groups.pull()
    assert torch.equal(trained[0].weight, copies[0].weight)


def test_a_ps_that_comes_back_overwrites_nothing_of_a_script_and_is_given_nothing_of_it(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """All values came back, or a checkpoint's, as if the script had loaded nothing."""
    job = start("tcp")
    models = prepare(job.groups, 1)
    save_all(job.stores, tmp_path)
    trained_with(job, job.groups, models[0], 0)
    nn.init.ones_(models[0].weight)
    for store in job.stores:
        store.checkpoints.restore_shards(str(tmp_path))
    job.groups.roll_back()
    trained_with(job, job.groups, models[2], 2)
    assert bool((models[0].weight == 1).all())
    for store in job.stores:  # without any
        store.state.locked_groups.clear()
        store.state.store_epoch += 1
    with pytest.raises(ConfigurationError, match=r"^weight was changed here"):
        job.groups.reconnect()


def test_what_was_changed_before_something_is_loaded_is_refused_and_then_as_the_ps_have_it(
    start: Callable[..., Job],
) -> None:
    job = start("tcp")
    models = prepare(job.groups, 1)
    before = models[1].bias.clone()
    nn.init.ones_(models[1].bias)
    with pytest.raises(ConfigurationError, match=r"model1\.bias was changed here"):
        job.groups.check()
    job.groups.check()
    job.groups.pull()
    assert torch.equal(models[1].bias, before)


def test_an_update_that_is_skipped_counts_in_schedules_of_later_workers_too(start: Callable[..., Job]) -> None:
    """They would be behind the others: at staleness 0, where all need the same settings, the job ended by that."""
    job = start()
    model, copy, policy = nn.Linear(3, 2), nn.Linear(3, 2), GradientPolicy(nan="skip")
    later = VariableGroups(job.groups._runtime, None)
    [push] = job.groups.create([model], [torch.optim.SGD(model.parameters(), 0.1)], policy, lambda: None)
    [other] = later.create([copy], [torch.optim.SGD(copy.parameters(), 0.1)], policy, lambda: None)
    job.pushes.append(push)
    for factor in (1.0, torch.nan, 1.0):
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() * factor).backward()
        job.step()
    later.pull()
    assert (later.num_updates, job.num_updates()) == (2, {2}), "what the weights have"
    assert (push.num_applied, push.num_of_others) == (3, 0)
    assert (other.num_before(), other.num_of_others) == (3, 3)
