"""Replicas with mirrored objects: their threads, and as much of a strategy as mirrors need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from stratagem.strategy.replicas.mirrored import copies_of
from stratagem.strategy.replicas.mirrors import Mirrors
from stratagem.strategy.replicas.replica_threads import ReplicaThreads, current_replica

T = TypeVar("T")

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True)


def mirror(
    objects: Sequence[Any], devices: Sequence[torch.device], which: Callable[[], int | None], **more: Any
) -> Mirrors:
    """Mirrors that have been given ``objects``."""
    mirrors = Mirrors(devices, which, **more)
    mirrors.add(objects)
    return mirrors


class Replicas:
    """Two replicas on the CPU, unless other devices are given."""

    def __init__(self, devices: Sequence[str] = ("cpu:0", "cpu:1")) -> None:
        self.replica_threads = ReplicaThreads([torch.device(device) for device in devices])
        self.mirrors = Mirrors(self.replica_threads.devices, current_replica, meet=self.replica_threads.meet)

    def prepare(self, *objects: Any) -> Any:
        """The prepared object, or all of them."""
        proxies = self.mirrors.add(objects)
        return proxies[0] if len(proxies) == 1 else tuple(proxies)

    def run(self, step: Callable[[int], T]) -> list[T]:
        """Calls ``step`` in each replica, with its number."""
        with self.mirrors.running():
            return self.replica_threads.run(
                [functools.partial(step, replica) for replica in range(self.replica_threads.size)]
            )

    def copies(self, proxy: Any) -> tuple[Any, ...]:
        """What a proxy stands for on each replica."""
        return tuple(copies_of(proxy))

    def after_step(self, optimizer: Any, callback: Callable[[int, torch.optim.Optimizer], None]) -> None:
        """Has ``callback`` called after each step of an optimizer, with the number of the replica and its optimizer."""
        for replica, own in enumerate(self.copies(optimizer)):
            own.register_step_post_hook(lambda own, args, kwargs, replica=replica: callback(replica, own))
        self.mirrors.record()

    def average_gradients(self, model: torch.nn.Module) -> None:
        """In a step, after backward: every replica gets the mean of all replicas' gradients."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad = self.replica_threads.meet(f"gradient of {name}", parameter.grad, _averages)


def proxies(mirrors: Mirrors) -> list[Any]:
    """What the script uses: one for each object, in the order in which they were given."""
    return [*mirrors._all.values()]


def objects_of(mirrors: Mirrors) -> list[list[Any]]:
    """The objects of each replica, in the same order."""
    return [[copies_of(proxy)[replica] for proxy in mirrors._all.values()] for replica in range(len(mirrors.devices))]


def _averages(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    mean = torch.stack([gradient.cpu() for gradient in gradients]).mean(0)
    return [mean.to(gradient.device, copy=True) for gradient in gradients]


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same parameters, bit for bit, in memory of their own."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert all(mine.data_ptr() != theirs.data_ptr() for mine, theirs in pairs)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pairs)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: Any, part: slice = slice(None)) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.mse_loss(model(INPUTS[part]), TARGETS[part])
    return loss


def train_step(replicas: Replicas, model: Any, optimizer: Any, replica: int) -> float:
    """A step on this replica's half of the batch."""
    optimizer.zero_grad()
    loss_of(model, slice(4 * replica, 4 * replica + 4)).backward()
    replicas.average_gradients(model)
    rate = float(optimizer.param_groups[0]["lr"])
    optimizer.step()
    return rate
