"""The reference of docs/protocol.md 21: one process that runs the slices of every replica, with each replica's seed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.conformance.scenarios.training import cross_entropy
from tests.conformance.scenarios.workload import Workload


def run_slices(workload: Workload, num_replicas: int, seed: int = 0) -> dict[str, Any]:
    """Trains a model and an optimizer. Each replica has buffers and random numbers of its own; there is one set of
    parameters, and the gradient of a batch is the mean of the slices', weighted by their examples.

    Args:
        workload: of one model, one optimizer, and the cross entropy.
        num_replicas: slices of a batch.
        seed: of replica 0's random numbers; the others count on from there.

    Returns:
        losses, weights, and the average of buffers, weighted by examples.
    """
    model, optimizer = workload.objects
    models = [model, *(copy.deepcopy(model) for _ in range(num_replicas - 1))]
    states = [torch.Generator().manual_seed(seed + replica).get_state() for replica in range(num_replicas)]
    seen = [0] * num_replicas
    losses: list[float] = []
    before = torch.get_rng_state()
    for _ in range(workload.epochs):
        for batch in list(workload.loader):
            optimizer.zero_grad()
            each = -(-len(batch[0]) // num_replicas)
            loss = torch.zeros(())
            for replica, own in enumerate(models):
                _share_parameters(model, own)
                part = [column[replica * each : (replica + 1) * each] for column in batch]
                if not len(part[0]):
                    continue
                torch.set_rng_state(states[replica])
                share = len(part[0]) / len(batch[0])
                loss = loss + cross_entropy(own, part)[0] * share
                states[replica] = torch.get_rng_state()
                seen[replica] += len(part[0])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch.set_rng_state(before)
    return {
        "losses": losses,
        "weights": {f"0.{name}": p.tolist() for name, p in model.named_parameters()},
        "buffers": _averages(models, seen),
    }


def _share_parameters(model: nn.Module, other: nn.Module) -> None:
    """One set of parameters: the gradients of both add up."""
    for name, module in model.named_modules():
        target = other.get_submodule(name)
        for key, parameter in module.named_parameters(recurse=False):
            setattr(target, key, parameter)


def _averages(models: Sequence[nn.Module], seen: Sequence[int]) -> dict[str, Any]:
    found = {}
    for name, buffer in models[0].named_buffers():
        copies = torch.stack([model.get_buffer(name).double() for model in models])
        shares = torch.tensor(seen, dtype=torch.float64).view(-1, *[1] * buffer.dim()) / sum(seen)
        mean = (copies * shares).sum(0) if buffer.is_floating_point() else copies.amax(0)
        found[f"0.{name}"] = mean.to(buffer.dtype).tolist()
    return found
