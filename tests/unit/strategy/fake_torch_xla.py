"""A stand-in for torch_xla whose replicas are threads and whose devices are the CPU. Nothing is lazy.

For what the real one, on CPUs, cannot run: several replicas in sync. As with the real one, the memory of a tensor
cannot become that of another device's, so that moving a module makes new parameters (or swaps them).
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from tests.unit.ring.thread_group import TIMEOUT_S, Meeting, reduced

T = TypeVar("T")


def not_installed(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


class FakeXla:
    """The part of torch_xla 2.9 that Stratagem calls, installed for the length of a test.

    Args:
        size: replicas.
        version: what ``torch_xla.__version__`` says.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, version: str = torch.__version__) -> None:
        self.size = size
        self.num_syncs = [0] * size
        self.num_reduced_in_place = 0
        self._meeting = Meeting(size)
        self._offers: list[Sequence[torch.Tensor]] = [()] * size
        self._here = threading.local()
        top, core, model, runtime = (
            ModuleType(name)
            for name in ("torch_xla", "torch_xla.core", "torch_xla.core.xla_model", "torch_xla.runtime")
        )
        members: dict[ModuleType, dict[str, Any]] = {
            top: {"__version__": version, "device": lambda: torch.device("cpu"), "sync": self._sync, "core": core},
            core: {"xla_model": model},
            runtime: {"global_ordinal": lambda: self._rank, "world_size": lambda: size, "is_spmd": lambda: False},
            model: {
                "REDUCE_SUM": "sum",
                "REDUCE_MIN": "min",
                "REDUCE_MAX": "max",
                "all_reduce": self._all_reduce,
                "all_gather": self._all_gather,
            },
        }
        monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)
        monkeypatch.setattr(importlib.metadata, "version", not_installed)
        for module, names in members.items():
            module.__dict__.update(names)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def launch(self, work: Callable[[int], T]) -> list[T]:
        """Runs ``work`` on every replica; raises the first error of the lowest replica that has one."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def run(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error
                self._meeting.close(f"replica {rank} ended with {error!r}")

        threads = [threading.Thread(target=run, args=(rank,), name=f"replica {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        for error in errors:
            if error is not None:
                raise error
        return results

    @property
    def _rank(self) -> int:
        return int(getattr(self._here, "rank", 0))

    def _sync(self) -> None:
        self.num_syncs[self._rank] += 1

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        self._offers[self._rank] = [tensor.detach().clone() for tensor in tensors]
        self._meeting.meet()
        offers = list(self._offers)
        self._meeting.meet()
        shapes = [[tensor.shape for tensor in offer] for offer in offers]
        assert all(shape == shapes[0] for shape in shapes), f"replicas run other programs: {shapes}"
        return offers

    def _all_reduce(self, kind: str, inputs: Any, scale: float = 1.0) -> Any:
        single = isinstance(inputs, torch.Tensor)
        if self.size == 1:  # torch_xla does nothing then, and does not scale
            return inputs.clone() if single else inputs
        offers = self._exchange([inputs] if single else inputs)
        totals = [reduced(column, ReduceOp(kind)) * scale for column in zip(*offers, strict=True)]
        if single:
            return totals[0]
        for tensor, total in zip(inputs, totals, strict=True):
            tensor.copy_(total)
        self.num_reduced_in_place += len(totals)
        return inputs

    def _all_gather(self, value: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat([offer[0] for offer in self._exchange([value])], dim)
