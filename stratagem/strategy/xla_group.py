"""The replicas of a torch_xla job, one process for each, as a group of ranks."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Sequence

import numpy as np
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.worker.ring.group import Group, Tag

_HALVES = (torch.float16, torch.bfloat16)


def check_torch_xla() -> None:
    """Makes sure that torch_xla is there and was built for this torch.

    Raises:
        ConfigurationError: it is not; says what to install.
    """
    series = _series(torch.__version__)
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        try:
            version = str(importlib.import_module("torch_xla").__version__)
        except ModuleNotFoundError:
            raise ConfigurationError(
                f"TPUStrategy needs torch_xla, which is not installed: pip install 'torch_xla[tpu]~={series}.0'. Its "
                f"version has to match that of torch, {torch.__version__}; where there is none, install the torch that "
                "the newest torch_xla matches"
            ) from None
    if _series(version) != series:
        raise ConfigurationError(
            f"torch_xla {version} does not match torch {torch.__version__}: both need the same first two numbers. "
            f"Install torch_xla {series}, or torch {_series(version)}"
        )


def _series(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


class XlaGroup(Group):
    """Implements :class:`stratagem.worker.ring.group.Group`; every call moves its values to the device and back.

    That is for what is small or rare. Gradients stay on the device: :meth:`sum_on_device`. torch_xla has no timeout: a
    replica that never comes is waited for; one that is somewhere else is told by its tag.
    """

    name = "torch_xla"
    timeout_s = math.inf
    """XLA waits as long as it likes."""

    def __init__(self) -> None:
        self._xla = importlib.import_module("torch_xla")
        self._model = importlib.import_module("torch_xla.core.xla_model")
        runtime = importlib.import_module("torch_xla.runtime")
        self.rank: int = runtime.global_ordinal()
        self.size: int = runtime.world_size()
        self.device: torch.device = self._xla.device()
        """Of this replica."""
        self.num_devices = 1
        """Over which a batch of this replica is sharded: more than one under SPMD."""
        if runtime.is_spmd():
            if runtime.process_count() > 1:
                raise ConfigurationError(
                    "TPUStrategy by SPMD has one host, and here are more: leave torch_xla.runtime.use_spmd() out, and "
                    "start a process for each device with torch_xla.launch"
                )
            self.num_devices = runtime.global_runtime_device_count()
            self._spmd = importlib.import_module("torch_xla.distributed.spmd")
            self._mesh = self._spmd.Mesh(np.arange(self.num_devices), (self.num_devices,), ("data",))

    # -- on the device ------------------------------------------------------------------------------------------

    def sum_on_device(self, tensors: list[torch.Tensor]) -> None:
        """Sums each tensor over the replicas, in place; lazily, as part of the step's graph."""
        if tensors:
            self._model.all_reduce(self._model.REDUCE_SUM, tensors)

    def shard(self, tensor: torch.Tensor) -> None:
        """Lays the first dimension of a tensor on the device over all devices, if it divides; else all have all of it.

        XLA takes others too, but its partitioner aborts the process on some programs with them (torch_xla 2.9: a
        scatter by 2 indices over 4 devices).
        """
        if self.num_devices > 1 and tensor.dim() and tensor.shape[0] and tensor.shape[0] % self.num_devices == 0:
            self._spmd.mark_sharding(tensor, self._mesh, ("data", *[None] * (tensor.dim() - 1)))

    def run_graph(self) -> None:
        """Sends off everything that was only recorded so far."""
        self._xla.sync()

    # -- Group --------------------------------------------------------------------------------------------------

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        self._compare(tag)
        wide = source.float() if source.dtype in _HALVES else source
        if op is ReduceOp.PRODUCT:  # TPUs have no such reduction
            out.copy_(self._gathered(wide).prod(0))
            return
        out.copy_(self._model.all_reduce(getattr(self._model, f"REDUCE_{op.name}"), wide.to(self.device)).cpu())

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        self._compare(tag)
        padded = source.new_zeros(max(out.numel() for out in outs))
        padded[: source.numel()] = source
        for row, out in zip(self._gathered(padded), outs, strict=True):
            out.copy_(row[: out.numel()])

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        self._compare(tag)
        buffer.copy_(self._gathered(buffer)[root])

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        self._compare(tag)
        lengths = self._gathered(torch.tensor([source.numel() for source in sources], dtype=torch.int64))
        padded = sources[0].new_zeros(int(lengths.sum(1).max()))
        padded[: sum(source.numel() for source in sources)] = torch.cat(list(sources))
        for row, counts, out in zip(self._gathered(padded), lengths.tolist(), outs, strict=True):
            out.copy_(row.split([*counts, row.numel() - sum(counts)])[self.rank])

    def barrier(self, tag: Tag) -> None:
        self._compare(tag)

    def close(self, reason: str) -> None:
        """Nothing to do: the runtime belongs to the process."""

    def _compare(self, tag: Tag) -> None:
        tags = self._gathered(torch.tensor([tag.ordinal, tag.fingerprint], dtype=torch.int64)).tolist()
        for rank, other in enumerate(tags):
            if other != tags[self.rank]:
                raise CollectiveError(
                    f"replica {rank} is at collective {other[0]}, replica {self.rank} at {tag.ordinal}, or at another "
                    "one of that number: every replica has to make the same calls",
                    rank,
                )

    def _gathered(self, source: torch.Tensor) -> torch.Tensor:
        """One row for each rank."""
        if self.size == 1 or not source.numel():
            return source.expand(self.size, -1)
        rows: torch.Tensor = self._model.all_gather(source.to(self.device).unsqueeze(0), 0).cpu()
        return rows
