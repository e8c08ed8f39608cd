"""The collectives of a worker: one order for all of them, one error that says who and where (docs/protocol.md 19)."""

from __future__ import annotations

import collections
import functools
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError, SegmentError
from stratagem.measuring.flight import FLIGHT
from stratagem.worker.ring.group import Arena, Group, Tag, check_reducible
from stratagem.worker.ring.healing import KEPT_BYTES, Healing, Kept

logger = logging.getLogger(__name__)

T = TypeVar("T")
NUM_KNOWN = 64
"""Collectives of which a rank can say what it called."""


class Position(NamedTuple):
    ordinal: int = 0
    """Collectives begun so far in this generation."""
    step: int = 0
    """Step of the job in which the newest one was begun."""
    what: str = "nothing yet"
    """For example "all_reduce sum of 1,024 float32"."""

    def __str__(self) -> str:
        return f"step {self.step}, collective {self.ordinal} ({self.what})"

    @property
    def tag(self) -> Tag:
        """What travels with every message of the collective."""
        return Tag(self.ordinal, _fingerprint(self.step, self.what))


@functools.lru_cache(4096)
def _fingerprint(step: int, what: str) -> int:
    return zlib.crc32(f"{step}/{what}".encode())


class Communicator:
    """Runs collectives over a group, one after the other, in the order of the calls.

    All ranks must make the same calls in the same order. Tensors may have any shape and strides and be on any device;
    this class makes what the group needs (flat, contiguous, on its device or the CPU). ``group``: who takes part, and
    how bytes move; ``explain``: turns an error of the group into the one that is raised: which rank is to blame, where
    all ranks were; ``healing``: how the ring continues after a loss; None: it does not.
    """

    def __init__(
        self,
        group: Group,
        explain: Callable[[CollectiveError, Position], CollectiveError],
        healing: Healing | None = None,
    ) -> None:
        self.group = group
        self.healing = healing
        self.generation = 0
        """How often the group was replaced by one of other ranks."""
        self.restarts = 0
        """How often it was made to work again, on all ranks, after an error in a step."""
        self.step = 0
        """Step of the job, set by the strategy; ranks at different steps do not mix."""
        self.position = Position()
        self._begun: collections.deque[Position] = collections.deque(maxlen=NUM_KNOWN)
        self.is_inside = False
        """Whether this rank is in a collective."""
        self._since = 0.0
        self._explain = explain
        self._error: CollectiveError | None = None
        self._turn = threading.RLock()
        self._counting = threading.Lock()
        self._num_queued = 0
        self._is_own = threading.local()
        mark = functools.partial(setattr, self._is_own, "thread", True)  # a thread that knew self would keep it alive
        self._thread = ThreadPoolExecutor(1, "collectives", mark)

    @property
    def is_alone(self) -> bool:
        """Whether no other rank can come to a collective now."""
        return False

    def check_caller(self) -> None:
        """ConfigurationError: the thread that calls runs another rank's step."""

    @property
    def rank(self) -> int:
        """This rank, 0 … size-1."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.group.size

    @property
    def told_size(self) -> int:
        """Ranks that a script is told of: a newcomer, alone yet, hears how many the others began with, by which they
        have scaled their batches."""
        return self.healing.num_first if self.healing is not None and self.healing.is_new else self.size

    @property
    def device(self) -> torch.device:
        """Where tensors cost no copy: that of the group."""
        return self.group.device

    def arena(self, num_bytes: int, in_place: bool = False) -> Arena:
        """Memory in which :meth:`all_reduce` copies nothing, kept until it is freed; where there is not enough
        shared memory, memory of this process, and reducing it costs copies. ``in_place``: the source is the result."""
        what = f"arena of {num_bytes:,} bytes{', in place' * in_place}"

        def make() -> Arena:
            try:
                return self.collective(what, lambda tag: self.group.arena(num_bytes, tag, in_place))
            except SegmentError as error:  # on every rank of a host alike; other hosts go on, as after an arena
                logger.warning("reducing with copies: %s", error)
                return Arena.of(lambda: torch.zeros(num_bytes, dtype=torch.uint8), in_place)

        return self.atomic(make)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reduction of all ranks' tensors, on every rank, bit-identical.

        Args:
            tensor: same shape and dtype on every rank; left as it is.
            op: MEAN wants a floating dtype.
            out: where the result goes; flat views of an arena cost no copy. None: a new tensor.

        Raises:
            CollectiveError: a rank is gone, stands still, or is somewhere else; see :class:`Position`.
        """
        op = ReduceOp(op)
        is_short = tensor.is_floating_point() and tensor.itemsize < 4
        if op is ReduceOp.MEAN and is_short:  # a sum of halves may be Inf where their mean is none
            wide = self.all_reduce(tensor.float(), op)
            return wide.to(tensor.dtype) if out is None else out.copy_(wide)
        check_reducible(tensor.dtype, op)
        if tensor.is_complex():  # by its parts: lanes know real numbers
            total = torch.view_as_complex(self.all_reduce(torch.view_as_real(tensor.detach().resolve_conj()), op))
            return total if out is None else out.copy_(total)
        flat = self._flat(tensor)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
        if result.shape != tensor.shape or result.dtype != tensor.dtype:
            raise ConfigurationError(
                f"expected out of shape {list(tensor.shape)} and {tensor.dtype}, got {list(result.shape)} and "
                f"{result.dtype}"
            )
        target = result if result.device == flat.device and result.is_contiguous() else torch.empty_like(flat)
        group_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        what = f"all_reduce {op.value} of {tensor.numel():,} {name_of(tensor.dtype)}"
        if self.healing is not None and flat.data_ptr() == target.data_ptr():
            flat = flat.clone()  # it may have to be reduced again

        def reduce() -> int:
            size = self.size
            self.collective(what, lambda tag: self.group.all_reduce(flat, target.view(-1), group_op, tag))
            return size

        def take_over(kept: Kept) -> int:
            bytes_of(target).copy_(kept.data)
            return kept.lengths[0]

        size = self.atomic(reduce, lambda size: Kept([size], bytes_of(target.cpu())), take_over)
        if op is ReduceOp.MEAN:
            target.div_(size)
        if target is not result:
            result.copy_(target.view(result.shape))
        return result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; the first dimension may differ between ranks, 0 included."""
        flat = bytes_of(self._flat(tensor))
        mine = torch.tensor([tensor.shape[0] if tensor.dim() else 1], dtype=torch.int64)
        rest = tensor.shape[1:]
        row_bytes = math.prod(rest) * tensor.itemsize
        if not row_bytes:  # nothing tells how many rows there are
            rows = self.all_gather(torch.empty(tensor.shape[0], dtype=torch.bool))
            return [tensor.new_empty(row.shape[0], *rest) for row in rows]
        what = f"all_gather of {name_of(tensor.dtype)} rows of {list(rest)}"

        def gather() -> list[torch.Tensor]:
            rows = [torch.empty_like(mine) for _ in range(self.size)]
            self.collective(f"lengths for {what}", lambda tag: self.group.all_gather(mine, rows, tag))
            outs = [flat.new_empty(int(count) * row_bytes) for count in rows]
            self.collective(what, lambda tag: self.group.all_gather(flat, outs, tag))
            return outs

        def take_over(kept: Kept) -> list[torch.Tensor]:
            return list(kept.data.clone().to(flat.device).split(kept.lengths))

        outs = self.atomic(gather, _kept, take_over)
        shapes = [(out.numel() // row_bytes, *rest) if tensor.dim() else () for out in outs]
        return [out.view(tensor.dtype).view(shape).to(tensor.device) for out, shape in zip(outs, shapes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Gives every rank the values of ``root``'s tensor, in place."""
        flat = self._flat(tensor)
        buffer = flat if flat.data_ptr() != tensor.data_ptr() or tensor.requires_grad else tensor.view(-1)
        what = f"broadcast of {tensor.numel():,} {name_of(tensor.dtype)} from rank {root}"
        sender = "" if self.healing is None else self.healing.members[root]

        def send() -> None:
            place = root if self.healing is None else self.healing.rank_of(sender)
            self.collective(what, lambda tag: self.group.broadcast(bytes_of(buffer), place, tag))

        self.atomic(send)
        if buffer.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(buffer.view(tensor.shape))
        return tensor

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank r gets what every rank holds at ``tensors[r]``, in rank order; first dimensions may differ. One tensor
        for each rank, of one dtype and equal trailing dimensions."""
        if len(tensors) != self.size:
            raise ConfigurationError(f"expected {self.size} tensors, one for each rank, got {len(tensors)}")
        rest, dtype, device = tensors[0].shape[1:], tensors[0].dtype, tensors[0].device
        sources = [self._flat(tensor) for tensor in tensors]
        counts = torch.tensor([tensor.shape[0] for tensor in tensors], dtype=torch.int64)
        every = [torch.empty_like(counts) for _ in range(self.size)]
        what = f"all_to_all of {name_of(dtype)} rows of {list(rest)}"
        self.collective(f"lengths for {what}", lambda tag: self.group.all_gather(counts, every, tag))
        lengths = [int(row[self.rank]) for row in every]
        outs = [sources[0].new_empty(count * math.prod(rest)) for count in lengths]
        self.collective(what, lambda tag: self.group.all_to_all(sources, outs, tag))
        return [out.view((count, *rest)).to(device) for out, count in zip(outs, lengths, strict=True)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.atomic(self.confirm, lambda _: Kept([], torch.empty(0, dtype=torch.uint8)), lambda _: None)

    def confirm(self) -> None:
        """A barrier that is not made again after a loss: the last one of the job, or the end of larger ones."""
        self.collective("barrier", lambda tag: self.group.barrier(tag))

    def atomic(
        self,
        work: Callable[[], T],
        pack: Callable[[T], Kept | None] = lambda _: None,
        unpack: Callable[[Kept], T] | None = None,
        is_training: bool = False,
    ) -> T:
        """Runs collectives that count on every rank or, if one is lost meanwhile, are made again by those who are left.

        Args:
            work: makes them. Its inputs stay as they are until it has returned; the number of ranks may change
                from one attempt to the next.
            pack: their result, if it is the same on every rank and small; None: all ranks meet once more.
            unpack: the result, as another rank has packed it.
            is_training: whether with them the examples of the step have counted.

        Raises:
            CollectiveError: see :meth:`all_reduce`.
        """
        if self.healing is None or self._is_in_own_thread():
            return work()
        return self.healing.run(self, work, pack, unpack or _not_packed, is_training)

    @property
    def is_broken(self) -> bool:
        """Whether the group has failed, and collectives with it."""
        return self._error is not None

    def renew(self, group: Group) -> None:
        """Goes on with another group, after what was queued for the broken one has failed."""
        self._thread.submit(lambda: None).result()
        self.group.close("its ring has healed")
        self.group, self._error, self.position = group, None, Position(0, self.step, "a new generation")
        self.generation += 1

    def collective(self, what: str, run: Callable[[Tag], T]) -> T:
        """Runs ``run``, one operation of the group, as the next collective. ``what`` says the same on every rank that
        means the same collective; ``run`` gets what travels with every message. Raises CollectiveError: see
        :meth:`all_reduce`."""
        if self._num_queued and not self._is_in_own_thread():
            return self.submit(lambda: self.collective(what, run)).result()
        with self._turn:
            if self._error is not None:
                raise self._error
            self.position = position = Position(self.position.ordinal + 1, self.step, what)
            self._begun.append(position)
            self._since = time.monotonic()
            self.is_inside = True
            try:
                with FLIGHT.happening("", position):
                    return run(position.tag)
            except CollectiveError as error:
                self._error = self._explain(error, self.position)
                if self.healing is None:  # else those who are left may make it again
                    FLIGHT.tell(logger)
                raise self._error from None
            except BaseException as error:
                if not isinstance(error, Exception):  # Ctrl-C, say: nobody knows which part of it the others have
                    self._error = CollectiveError(f"this rank left {self.position} by {type(error).__name__}")
                raise
            finally:
                self.is_inside = False

    def called(self, ordinal: int) -> str:
        """What this rank called as that collective; empty if it has not come to it, or long ago."""
        return next((each.what for each in [*self._begun][::-1] if each.ordinal == ordinal), "")

    def waiting(self) -> tuple[int, str, float] | None:
        """The rank that this one waits for at this moment, in which collective, and for how many seconds it goes on."""
        rank, position, since = self.group.waiting_on(), self.position, self._since
        return None if rank is None else (rank, position.what, time.monotonic() - since)

    def submit(self, work: Callable[[], T], is_awaited: bool = False) -> Future[T]:
        """Runs ``work``, which makes collectives, in the communicator's own thread, after all submitted before.

        A collective called directly waits for its turn behind everything submitted before it. What that thread itself
        submits, for example where a future is completed, runs at once: behind the queue it would wait for itself. So
        does what is submitted to be waited for right away (``is_awaited``), where nothing is queued: here and now is
        two changes of threads less.
        """
        is_own = self._is_in_own_thread()
        if is_own or (is_awaited and not self._num_queued):
            future: Future[T] = Future()
            self._is_own.thread = True
            try:
                future.set_result(work())
                return future
            except Exception as error:
                return _failed(error)
            finally:
                self._is_own.thread = is_own
        with self._counting:
            self._num_queued += 1
        return self._thread.submit(self._run_queued, work)

    def close(self, reason: str = "the job is over") -> None:
        """Frees the group and the thread; whoever waits gets ``CollectiveError``."""
        self.group.close(reason)
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements, flat and contiguous, where the group takes them; no copy of what is."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        return (tensor if tensor.device == self.device else tensor.cpu()).contiguous().view(-1)

    def _is_in_own_thread(self) -> bool:
        return getattr(self._is_own, "thread", False)

    def _run_queued(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            with self._counting:
                self._num_queued -= 1


def any_says(workers: Communicator, wish: bool) -> bool:
    """Whether any of the ranks has a wish. Every rank has to call it."""
    return bool(workers.all_reduce(torch.tensor(int(wish)), ReduceOp.MAX))


def _failed(error: Exception) -> Future[Any]:
    """Not made where the error came by: its traceback has the variables there, and in a circle with it the memory of
    the group that failed would stay until the garbage is collected."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _kept(parts: Sequence[torch.Tensor]) -> Kept | None:
    """Flat tensors of one dtype as one."""
    if sum(part.nbytes for part in parts) > KEPT_BYTES:
        return None
    return Kept([part.numel() for part in parts], bytes_of(torch.cat(list(parts)).cpu()))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # view(-1) leaves a single element any stride
    return flat.view(torch.uint8)


def _not_packed(_: Kept) -> NoReturn:
    raise AssertionError("what is not packed is confirmed, and nobody takes it over")


def name_of(dtype: torch.dtype) -> str:
    """For example "float32"."""
    return str(dtype).removeprefix("torch.")
