"""A process group of ``torch.distributed`` whose bytes move by the ring's groups."""

from __future__ import annotations

import datetime
import functools
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from stratagem.distributed import open_groups
from stratagem.distributed.comm_memory import CommMemory
from stratagem.distributed.messages import Messages
from stratagem.distributed.nccl import Nccl, or_nccl
from stratagem.distributed.operations import Operation, Operations
from stratagem.distributed.reductions import AllReducePlan, all_reduce_plan, op_of
from stratagem.distributed.tensors import check_writable, flat, listed, plain, put, room_for, told
from stratagem.distributed.work import DONE, NO_TIMEOUT, LaneWork, ReceiveWork, SendWork, recorded
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.rpc.logs import shortened
from stratagem.worker.ring.communicator import Communicator

Tensors = list[torch.Tensor]


class LaneProcessGroup(dist.ProcessGroup):
    """Implements ``torch.distributed.ProcessGroup``. Collectives run one after the other in the order of the calls, in
    a thread of the group, or in the caller's if it waits for the result anyway.

    All ranks must make the same calls in the same order, with equal numbers of elements and equal dtypes. A mismatch
    is an error on every rank that says where each rank was. After an error the group cannot be used any more.

    Args:
        tasks: the ranks.
        messages: for send and recv, also of tensors on GPUs.
        nccl: runs collectives of tensors on GPUs, if NCCL is available.
        split: makes a group of some of these ranks, at a store.
        close: frees the group's resources, with a reason, and whether this rank has failed.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        communicator: Communicator,
        messages: Messages,
        nccl: Nccl,
        store: Store,
        split: Callable[[Store, list[int], datetime.timedelta | None], LaneProcessGroup],
        close: Callable[[str, bool], None],
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.tasks = tasks
        self.communicator = communicator
        self._messages = messages
        self.nccl = nccl
        self._memory = CommMemory(lambda num_bytes: communicator.arena(num_bytes, in_place=True).source)
        self._operations = Operations(communicator.rank, communicator.size)
        self._store = store
        self._split = split
        self._close = close
        self._ended = ""
        self._name = self._description = ""
        open_groups.OPEN.add(self)

    def getBackendName(self) -> str:
        return "stratagem"

    def setGroupName(self, name: str) -> None:
        """Called by ``new_group``. torch keeps name and description in a group's backends; this group has none."""
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    _device_types = [torch.device("cpu")]  # noqa: RUF012

    def _get_backend(self, device: torch.device) -> LaneProcessGroup:
        """Itself: there is nothing under it. What torch asks a backend for follows."""
        return self

    supports_splitting = True
    supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory in which collectives copy less: see :class:`CommMemory`. All ranks must ask for the same sizes in the
        same order, as FSDP2 does after ``module.set_allocate_memory_from_process_group_for_comm(True)``. ``size``:
        elements of the flat tensor."""
        return self._memory.allocate(size, dtype)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> LaneProcessGroup | None:
        """A group of some ranks of this one, each of which calls it; None on the others.

        Args:
            timeout: timeout of the new group; None: the timeout of this one.
            group_name: a new name, the same on every rank; None: made from the ranks.
        """
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"split:{','.join(map(str, new_ranks))}"
        made = self._split(PrefixStore(f"{name}/", self._store), list(new_ranks), timeout)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or "")
        return made

    splitGroup = split_group

    options: Any = None  # torch.distributed.split_group copies them

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Of ``init_process_group(device_id=…)``: nothing has to be connected, but ``split_group`` checks for it."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Called by ``new_group``, after that, on the ranks outside the new group."""

    def _set_sequence_number_for_group(self) -> None:
        """Called by ``torch.distributed.split_group``: collectives are counted from 1 on in every group."""

    def get_group_store(self) -> Store:
        return self._store

    # -- collectives: torch's names and arguments ---------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduces each tensor in place."""
        tensors, op = listed(tensors), op_of(opts)
        if len(tensors) == 1 and timeout is None and _is_plain(opts):
            values, plan = plain(tensors[0]), all_reduce_plan(op, tensors[0].dtype, tensors[0].shape)
            if values is not None and plan is not None:
                return self._all_reduce_plain(tensors, values, plan)
        if not self.nccl.takes([tensors, opts]):
            return self._run(self._operations.all_reduce(tensors, op), opts, timeout)
        self.check_open("all_reduce")
        return self.nccl.call("allreduce" if len(tensors) == 1 else "allreduce_coalesced", tensors, opts)

    def _all_reduce_plain(self, tensors: Tensors, values: torch.Tensor, plan: AllReducePlan) -> LaneWork:
        """What most calls ask for, in a few calls of its own: a short tensor takes 10 µs, of which each is some."""
        self.check_open(plan.what)
        communicator = self.communicator
        communicator.collective(plan.what, functools.partial(communicator.group.all_reduce, values, values, plan.op))
        plan.reduction.finish(values, communicator.group.size)
        return LaneWork(plan.what, tensors, DONE)

    allreduce_coalesced = allreduce

    @or_nccl()
    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, root: int = 0) -> LaneWork:
        """Gives every rank the root's values."""
        root = root if opts is None else opts if isinstance(opts, int) else opts.rootRank
        return self._run(self._operations.broadcast(listed(tensors), self._member(root)), opts)

    @or_nccl()
    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> LaneWork:
        """Reduces to one rank."""
        return self._run(self._operations.reduce(listed(tensors), op_of(opts), self._member(opts.rootRank)), opts)

    @or_nccl()
    def allgather(self, outputs: Any, inputs: Tensors | torch.Tensor, opts: Any = None) -> LaneWork:
        """Sends every rank's tensor to every rank; lengths may differ, and are those of the outputs."""
        lists = [outputs] if isinstance(inputs, torch.Tensor) else outputs
        return self._run(self._operations.all_gather(lists, listed(inputs)), opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> LaneWork:
        """Like :meth:`allgather` for several tensors: ``outputs[rank][i]`` is rank's ``inputs[i]``."""
        return self._run(self._operations.all_gather([list(each) for each in zip(*outputs, strict=True)], inputs), opts)

    @or_nccl("_allgather_base")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LaneWork:
        """Concatenates every rank's tensor in ``output``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    @or_nccl("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LaneWork:
        """Like :meth:`all_gather_single` for several tensors."""
        return self._run(self._operations.all_gather_single(outputs, inputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @or_nccl()
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Gives rank r the reduction of every rank's ``inputs[r]``; lengths may differ between ranks."""
        lists = [inputs] if isinstance(outputs, torch.Tensor) else inputs
        return self._run(self._operations.reduce_scatter(listed(outputs), lists, op_of(opts)), opts)

    @or_nccl("_reduce_scatter_base")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LaneWork:
        """Like :meth:`reduce_scatter` with the ranks' parts concatenated in ``input``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @or_nccl("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LaneWork:
        """Like :meth:`reduce_scatter_single` for several tensors."""
        return self._run(self._operations.reduce_scatter_single(outputs, inputs, op_of(opts)), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @or_nccl("alltoall_base")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> LaneWork:
        """Sends this rank's r-th part of the rows to rank r; without sizes the parts are equal."""
        operation = self._operations.all_to_all_single(output, input, output_split_sizes, input_split_sizes)
        return self._run(operation, opts)

    alltoall_base = all_to_all_single

    @or_nccl()
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LaneWork:
        """Sends ``inputs[r]`` to rank r; shapes may differ."""
        return self._run(self._operations.all_to_all(outputs, inputs), opts)

    @or_nccl()
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> LaneWork:
        """Sends every rank's tensor to one rank."""
        return self._run(self._operations.gather(outputs, inputs[0], self._member(opts.rootRank)), opts)

    @or_nccl()
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> LaneWork:
        """Sends one tensor of a rank to each rank."""
        return self._run(self._operations.scatter(outputs[0], inputs, self._member(opts.rootRank)), opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> LaneWork:
        """Completes when every rank has called it."""
        return self._run(self._operations.barrier(), opts, timeout)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose rank 0 names the ranks that did not arrive in time; the group stays usable afterwards.
        ``torch.distributed.monitored_barrier`` accepts only gloo; this is the method it would call.

        Raises:
            CollectiveError: a rank did not arrive.
        """
        seconds = self._messages.timeout_s if timeout is None else timeout.total_seconds()
        self._messages.barrier(seconds, wait_all_ranks)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets how long a rank may stall in any later collective, receive or send."""
        self.communicator.group.timeout_s = self._messages.timeout_s = timeout.total_seconds()
        self.nccl.set_timeout(timeout.total_seconds())

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> LaneWork:
        """Sends a tensor to one rank; completes when the tensor may be changed."""
        self.check_open("send")
        send = functools.partial(self._messages.send, flat(tensors[0]), self._other(dstRank), _tag(tag))
        return recorded("send", lambda: SendWork(dstRank, send(), self._messages))

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> LaneWork:
        """Receives a tensor from one rank; tensors with the same tag arrive in the order in which they were sent."""
        return self._receive(tensors[0], self._other(srcRank), _tag(tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> LaneWork:
        """Like :meth:`recv`, from whichever rank sends first."""
        return self._receive(tensors[0], None, _tag(tag))

    def _member(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ConfigurationError(f"there is no rank {rank} in this group: it has the ranks 0 to {self.size() - 1}")
        return rank

    def _other(self, rank: int) -> int:
        if rank == self.rank():
            raise ConfigurationError(f"rank {rank} cannot send to or receive from itself")
        return self._member(rank)

    def _receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> LaneWork:
        self.check_open("recv")
        check_writable(tensor)
        room, messages = room_for(tensor), self._messages
        what = f"recv of {told(tensor)} from {'any rank' if source is None else f'rank {source}'} with tag {tag}"
        receive = functools.partial(messages.receive, room, source, tag)
        finish = functools.partial(put, [tensor], [room])
        return recorded("recv", lambda: ReceiveWork(what, tensor, receive(), finish, messages))

    # -- the end ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Aborts what is running, here and on the other ranks: they raise ``CollectiveError``."""
        self.nccl.close(is_aborted=True)
        self._end("the process group was aborted")

    def shutdown(self, failure: BaseException | None = None) -> None:
        """Frees lanes, threads and memory; queued operations fail. The other ranks are told of ``failure``, which has
        ended the script, or of an error that is being handled where this is called."""
        if not self._ended:
            self.nccl.close(is_aborted=False)
        reason = f"rank {self.communicator.rank} has destroyed its process group, or ended"
        failure = failure or sys.exception()
        # Data that end are no error: others may still have to complete the last collective.
        if has_failed := isinstance(failure, Exception) and not isinstance(failure, StopIteration):
            reason += f", at {shortened(traceback.format_exception_only(failure)[-1].strip())}"
        self._end(reason, has_failed)

    def _end(self, reason: str, has_failed: bool = False) -> None:
        self._ended = self._ended or reason
        self._close(reason, has_failed)

    def check_open(self, what: str) -> None:
        """Raises ``CollectiveError`` once the group has ended."""
        if self._ended:
            raise CollectiveError(f"{what}: {self._ended}")

    def _run(self, operation: Operation, opts: Any, timeout: datetime.timedelta | None = None) -> LaneWork:
        timeout = timeout or getattr(opts, "timeout", None)
        if timeout is not None and timeout > NO_TIMEOUT:
            operation.limit(timeout.total_seconds())
        self.check_open(operation.what)
        is_inference = torch.is_inference_mode_enabled()  # what was made in that mode can be written in it alone
        for tensor in operation.outputs:
            check_writable(tensor)
            is_inference = is_inference or tensor.is_inference()
        is_async = getattr(opts, "asyncOp", True)
        return recorded(operation.what, lambda: self._begin(operation, is_async, is_inference))

    def _begin(self, operation: Operation, is_async: bool, is_inference: bool) -> LaneWork:
        run = functools.partial(operation.run, self.communicator, is_inference)
        if not is_async:  # the caller waits: here and now is one change of threads less
            run()
            return LaneWork(operation.what, operation.outputs, DONE)
        return LaneWork(
            operation.what, operation.outputs, self.communicator.submit(functools.partial(_without_gradients, run))
        )


def _keep_dynamo_out(owner: type) -> None:
    """Out of the methods of a class: ``torch.compile`` around a model of DDP looks into every Python function that runs
    meanwhile, also if C++ calls it. ``torch.compiler.disable`` would keep it out, but loads all of the compiler, and
    costs every call some time."""
    skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in vars(owner).values():
        if isinstance(function, types.FunctionType):
            for each in (function, inspect.unwrap(function)):
                set_code_exec_strategy(each.__code__, skipped)


_keep_dynamo_out(LaneProcessGroup)


def _without_gradients(run: Callable[[], None]) -> None:
    """In another thread than the call, and when an output may have become one of an autograd function."""
    with torch.no_grad():
        run()


def _tag(tag: int) -> int:
    if not isinstance(tag, int) or not 0 <= tag < 1 << 31:  # as torch's other backends
        raise ConfigurationError(f"expected a tag from 0 to {(1 << 31) - 1:,}, got {tag!r}")
    return tag


def _is_plain(opts: Any) -> bool:
    """Whether the caller waits for the result, as long as the group's own timeout allows, and no profiler looks on."""
    if getattr(opts, "asyncOp", True) or opts.timeout > NO_TIMEOUT:  # opts may be the reduction itself
        return False
    return not (torch.is_inference_mode_enabled() or torch._C._autograd._profiler_enabled())
