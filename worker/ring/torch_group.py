"""NCCL, through ``torch.distributed``: for workers that all compute on CUDA devices."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.rpc.binding import listening
from stratagem.worker.ring.group import Arena, Breakable, Group, OutOfStepError, Tag

_EAGER_POLLS = 200
"""How often a collective is asked whether it is done, before the caller sleeps between the questions."""
_LONGEST_SLEEP_S = 0.001
_LOOK_S = 2.0
"""How long a rank waits before it tells the others where, and looks where they wait."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def free_store_address(host: str) -> str:
    """ "host:port" at which rank 0's store can listen; another process might take the port before it does."""
    with listening(host) as listener:
        return f"{host}:{listener.getsockname()[1]}"


def gpu_of(device: torch.device, rank: int) -> str:
    """Which GPU a device is, unlike every other in the world; empty: none. NCCL 2.31 and later takes several ranks on
    one where its variable ``NCCL_MULTI_RANK_GPU_ENABLE`` says so; each then counts as one of its own."""
    if device.type != "cuda":
        return ""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"
    return f"{gpu} for rank {rank}" if shared else gpu


class TorchGroup(Breakable, Group):
    """Implements :class:`stratagem.worker.ring.group.Group` by a process group of its own.

    NCCL is what this class is for. With gloo it runs on a CPU, so that it can be tested without a GPU; lanes of our
    own are faster there. The group is private: ``torch.distributed``'s default group, if the script has made one, is
    neither used nor touched. Tensors may be on the CPU or on the group's device, and travel from the device: what the
    caller's stream has yet to do to the latter is waited for.

    What NCCL does not do, this class cannot promise: it never says which rank it waits for, so most errors name none.
    The tags are compared in :meth:`barrier` and :meth:`arena` only: in every call that would be one more collective,
    about as long as a small all-reduce itself. In between, ranks in different collectives find each other in the store
    after two seconds, if their messages do not fit together, and by the next barrier otherwise. Partial sums of float16
    and bfloat16 are rounded as NCCL does.

    Args:
        backend: "nccl", or "gloo" for tests.
        store_address: "host:port"; rank 0 listens there, at that host's address only.
        timeout_s: seconds a collective may take.
        device: where collectives run; a CUDA device for NCCL.

    Raises:
        CollectiveError: the ranks did not find each other in time.
        ConfigurationError: this torch has no such backend.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        backend: Literal["nccl", "gloo"],
        store_address: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name: str = backend
        self.rank = rank
        self.size = size
        self.device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Where tensors of the CPU come and go, whatever the caller's stream is busy with."""
        self.timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._group: Any = None
        if failure := self._connect(store_address):
            raise self.break_off(CollectiveError(f"the ranks did not find each other: {backend}: {failure}"))

    def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        """Memory on the group's device."""
        self.barrier(tag)
        return Arena.of(lambda: torch.zeros(num_bytes, dtype=torch.uint8, device=self.device), in_place)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        self.check()
        if not source.numel():
            return
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.name)
        with self._stream_for(source, out):
            total = out if out.device == self.device else torch.empty_like(out, device=self.device)
            if source.data_ptr() != total.data_ptr():
                total.copy_(source)
            self._run(lambda group: group.allreduce([total], options), tag)
            _fill(out, total)

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        """Shorter tensors are padded on their way: NCCL gathers equal lengths."""
        self.check()
        longest = max(out.numel() for out in outs)
        if not longest:
            return
        with self._stream_for(source, *outs):
            padded = torch.zeros(longest, dtype=source.dtype, device=self.device)
            padded[: source.numel()].copy_(source)
            rows = [torch.empty_like(padded) for _ in outs]
            self._run(lambda group: group.allgather([rows], [padded]), tag)
            for out, row in zip(outs, rows, strict=True):
                out.copy_(row[: out.numel()])

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        self.check()
        if not buffer.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._stream_for(buffer):
            moved = buffer.to(self.device)
            self._run(lambda group: group.broadcast([moved], options), tag)
            _fill(buffer, moved)

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        self.check()
        out_lengths, lengths = [out.numel() for out in outs], [source.numel() for source in sources]
        with self._stream_for(*sources, *outs):
            sent = torch.cat([source.to(self.device) for source in sources])
            received = torch.empty(sum(out_lengths), dtype=sent.dtype, device=self.device)
            self._run(lambda group: group.alltoall_base(received, sent, out_lengths, lengths), tag)
            for out, part in zip(outs, received.split(out_lengths), strict=True):
                out.copy_(part)

    def barrier(self, tag: Tag) -> None:
        """Also tells when the ranks are not in the same collective: every rank's tag goes to every rank."""
        self.check()
        mine = torch.tensor([tag.ordinal, tag.fingerprint], dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        self.all_gather(mine, every, tag)
        for rank, theirs in enumerate(every):
            if not torch.equal(mine, theirs):
                raise self.break_off(_out_of_step(rank, tag, Tag(*theirs.tolist())))

    def _stream_for(self, *tensors: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        is_side = self._side is not None and all(tensor.is_cpu for tensor in tensors)
        return torch.cuda.stream(self._side) if is_side else contextlib.nullcontext()

    def _run(self, start: Callable[[Any], Any], tag: Tag) -> None:
        """Starts a collective and waits until its outputs are complete."""
        failure: CollectiveError | str | None = self._attempt(start, tag)
        if isinstance(failure, str):
            failure = CollectiveError(f"collective {tag.ordinal} failed: {self.name}: {failure}")
        if failure is not None:
            raise self.break_off(failure)

    def _parted(self, tag: Tag) -> OutOfStepError | None:
        """Tells the others where this rank waits, and looks whether one waits in another collective of this number. Who
        is at another number has been through, or will be."""
        store = self._store
        if store is None:
            return None
        store.set(f"waits/{self.rank}", f"{tag.ordinal} {tag.fingerprint}")
        for rank in range(self.size):
            if rank != self.rank and store.check([key := f"waits/{rank}"]):
                ordinal, fingerprint = map(int, store.get(key).split())
                if ordinal == tag.ordinal and fingerprint != tag.fingerprint:
                    return _out_of_step(rank, tag, Tag(ordinal, fingerprint))
        return None

    # These two return errors: the traceback of one that is raised would keep the process group and its connections.

    def _connect(self, store_address: str) -> str:
        try:
            self._store = _store(self.rank, self.size, store_address, self.timeout_s)
            self._group = _process_group(self.rank, self.size, self.name, self._store, self.timeout_s)
        except (RuntimeError, OSError) as error:
            return _first_line(error)
        return ""

    def _attempt(self, start: Callable[[Any], Any], tag: Tag) -> OutOfStepError | str | None:
        begun = time.monotonic()
        deadline, look = begun + self.timeout_s, begun + _LOOK_S
        group = self._group
        if group is None:  # closed by another thread
            return "closed"
        try:
            work = start(group)
            polls = 0
            while not work.is_completed():
                if self._error is not None:
                    return "closed"
                polls += 1
                if polls > _EAGER_POLLS:
                    now = time.monotonic()
                    if now > deadline:
                        return f"not every rank took part within {self.timeout_s:g} s"
                    if now > look:
                        if (error := self._parted(tag)) is not None:
                            return error
                        look = now + _LOOK_S
                    time.sleep(min(_LONGEST_SLEEP_S, polls * 1e-7))
            work.wait()  # raises what went wrong
        except (RuntimeError, OSError) as failed:
            return _first_line(failed)
        return None

    def _end(self, error: CollectiveError) -> None:
        if self._group is not None:
            self._group.abort()
            self._group.shutdown()
        self._group = self._store = None


def _store(rank: int, size: int, address: str, timeout_s: float) -> TCPStore:
    """Rank 0 gives the store a socket bound to its own address; by itself it would listen on every one."""
    host, port = address.rsplit(":", 1)
    timeout = datetime.timedelta(seconds=timeout_s)
    if rank != 0:
        return TCPStore(host, int(port), size, False, timeout, wait_for_workers=False)
    listener = listening(host, int(port))
    return TCPStore(host, int(port), size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def _process_group(rank: int, size: int, backend: str, store: TCPStore, timeout_s: float) -> Any:
    timeout = datetime.timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if not dist.is_nccl_available():
        raise ConfigurationError("this torch was built without NCCL; take --transport auto, tcp or shm")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout * 2  # this class's own timeout comes first
    # Read once, by the constructor. NCCL's own thread would end the process at an error; here the caller raises it.
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        return nccl(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def _out_of_step(rank: int, tag: Tag, other: Tag) -> OutOfStepError:
    expected, got = (f"{each.ordinal} (fingerprint {each.fingerprint:08x})" for each in (tag, other))
    return OutOfStepError(f"expected rank {rank} in collective {expected}, it is in {got}", rank)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _fill(out: torch.Tensor, values: torch.Tensor) -> None:
    if out is not values:
        out.copy_(values)
