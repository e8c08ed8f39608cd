"""NCCL beside the lanes: collectives of tensors on GPUs, where every rank has one of its own."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from stratagem.cluster.communication import CommunicationOptions
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Tag
from stratagem.worker.ring.lane_plan import may_take_nccl, wants_nccl, why_not_nccl
from stratagem.worker.ring.torch_group import gpu_of

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}
_WORD_BYTES = 128


@dataclasses.dataclass(eq=False, repr=False)
class Nccl:
    """NCCL's group of the same ranks. They agree on it in their first collective of tensors on GPUs. ``_may_send``:
    whether what is sent may be read on its way, as NCCL's can be."""

    _communicator: Communicator
    _store: Store
    _tasks: Sequence[str]
    _options: CommunicationOptions
    _may_send: bool
    _is_agreed = False
    _group: dist.ProcessGroup | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the ranks have agreed on it."""
        return self._group is not None

    def takes(self, arguments: Sequence[Any]) -> bool:
        """Whether a call with these arguments goes over NCCL; the same on every rank. Raises CollectiveError: not every
        rank gives tensors on a GPU; ConfigurationError: NCCL was asked for, and cannot be had."""
        first: Any = arguments
        while type(first) in (list, tuple) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor):
            first = next(_tensors(arguments), None)
        if first is None or not _is_elsewhere(first):  # a short tensor of the host is asked no more than this
            return False
        if any(map(_is_bitwise, arguments)) or not all(map(_fits, _tensors(arguments))):
            return False
        if not self._is_agreed:
            self._agree(first.device)
        return self.is_taken

    def call(self, name: str, *arguments: Any, **named: Any) -> dist.Work:
        given = {key: value for key, value in named.items() if value is not None}
        work: dist.Work = getattr(self._group, name)(*(each for each in arguments if each is not None), **given)
        return work

    def set_timeout(self, timeout_s: float) -> None:
        if self._group is not None:
            self._group.set_timeout(datetime.timedelta(seconds=timeout_s))

    def close(self, is_aborted: bool) -> None:
        """Frees what it has of the device. ``is_aborted``: what runs ends too."""
        group, self._group, self._is_agreed = self._group, None, True
        if group is not None:
            (group.abort if is_aborted else group.shutdown)()

    def _agree(self, device: torch.device) -> None:
        rank, size = self._communicator.rank, self._communicator.size
        gpu = gpu_of(device, rank) if self._may_send and may_take_nccl(self._options) else ""
        word = f"{secrets.token_hex(8)} {gpu}"
        mine = torch.frombuffer(bytearray(word.encode().ljust(_WORD_BYTES)), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(size)]

        def gather(tag: Tag) -> None:
            self._communicator.group.all_gather(mine, every, tag)

        self._communicator.collective("the first collective of tensors on GPUs", gather)
        tokens, _, gpus = zip(*(bytes(each.tolist()).decode().strip().partition(" ") for each in every), strict=True)
        why_not = why_not_nccl(dict(zip(self._tasks, gpus, strict=True)))
        if not why_not and not dist.is_nccl_available():
            why_not = "this torch was built without NCCL"
        if not why_not:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=self._communicator.group.timeout_s)
            store = PrefixStore(f"nccl/{tokens[0]}/", self._store)  # which may serve another group after this one
            self._group = group_of(dist.ProcessGroupNCCL(store, rank, size, options), device, store)
            logger.info("rank %d of %d: tensors on GPUs go over NCCL", rank, size)
        elif wants_nccl(self._options):
            raise ConfigurationError(f"NCCL was asked for, but {why_not}; use the transport auto")
        elif may_take_nccl(self._options):
            logger.info("rank %d of %d: tensors on GPUs go through the host, because %s", rank, size, why_not)
        self._is_agreed = True


def group_of(backend: Backend, device: torch.device, store: Store) -> dist.ProcessGroup:
    """A group of torch's own with one backend, for tensors on devices of one type."""
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    kind = getattr(dist.ProcessGroup.BackendType, backend.name().upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


def or_nccl(name: str = "") -> Callable[[Method], Method]:
    """Of a collective of a process group that has a ``nccl``: tensors on GPUs go there, if it takes them. ``name``: of
    NCCL's method, if not as ours."""

    def decorate(method: Method) -> Method:
        theirs = name or method.__name__

        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            nccl: Nccl = self.nccl
            if nccl.takes((*arguments, *named.values()) if named else arguments):
                self.check_open(theirs)
                return nccl.call(theirs, *arguments, **named)
            return method(self, *arguments, **named)

        return call  # type: ignore[return-value]

    return decorate


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)


def _is_bitwise(given: Any) -> bool:
    """Whether options of a call name a reduction that NCCL has not, or are it."""
    op = getattr(given, "reduceOp", given)
    op = op.op if type(op) is dist.ReduceOp else op  # type: ignore[attr-defined]
    return isinstance(op, dist.ReduceOp.RedOpType) and op.name in ("BAND", "BOR", "BXOR")


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return not tensor.is_cpu


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in _DTYPES and tensor.layout is torch.strided
