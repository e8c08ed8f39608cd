"""The collectives of ``torch.distributed`` as steps of a group (:class:`stratagem.worker.ring.group.Group`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.distributed.reductions import Run, reducing
from stratagem.distributed.tensors import flat, movable, put, room_for, told
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.worker.ring.communicator import Communicator, name_of
from stratagem.worker.ring.group import Group, Tag

Step = tuple[str, Run]
"""One collective of a group, and what it is in words that are the same on every rank."""
Tensors = Sequence[torch.Tensor]


@dataclasses.dataclass(slots=True)
class Operation:
    """What one call of a process group does, after the arguments were checked."""

    what: str
    outputs: list[torch.Tensor]
    """Tensors of the caller that it fills."""
    steps: list[Step] = dataclasses.field(default_factory=list)
    values: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """The flat elements of ``outputs``."""

    def add(self, values: torch.Tensor, what: str, run: Run) -> None:
        """A step that makes the values of the next output."""
        self.values.append(values)
        self.steps.append((what, run))

    def run(self, communicator: Communicator, is_inference: bool) -> None:
        """Takes all steps, puts the values where they belong. ``is_inference``: outputs can be written in that mode."""
        for what, step in self.steps:
            run = functools.partial(step, communicator.group)
            communicator.collective(what, functools.partial(_in_inference_mode, run) if is_inference else run)
        put(self.outputs, self.values)

    def limit(self, timeout_s: float) -> None:
        """Gives the steps a timeout of their own."""
        self.steps = [(what, functools.partial(_limited, step, timeout_s)) for what, step in self.steps]


class Operations:
    """Makes the operations of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def barrier(self) -> Operation:
        return Operation("barrier", [], [("barrier", lambda group, tag: group.barrier(tag))])

    def broadcast(self, tensors: Tensors, root: int) -> Operation:
        """``tensors`` of the root to all."""
        made = Operation("broadcast", list(tensors))
        for tensor in tensors:
            values = flat(tensor)
            made.add(values, told(tensor, "broadcast of ", f" from rank {root}"), _broadcasting(values, root))
        return made

    def all_reduce(self, tensors: Tensors, op: Any) -> Operation:
        """Reduces each in place; sparse ones too, as DDP does with gradients of an embedding with ``sparse=True``."""
        made = Operation("all_reduce", list(tensors))
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                self._all_reduce_rows(made, tensor, op)
                continue
            reduction, values = reducing(op, tensor.dtype), flat(tensor)
            made.add(values, told(tensor, f"all_reduce {reduction.name} of "), reduction.all_reduce(values, values))
        return made

    def _all_reduce_rows(self, made: Operation, tensor: torch.Tensor, op: Any) -> None:
        """A sum of sparse tensors: every rank gets the elements of all and adds them in the order of the ranks."""
        reduction = reducing(op, tensor.dtype)
        if reduction.name not in ("SUM", "AVG"):
            raise ConfigurationError(f"sparse tensors are summed or averaged, not reduced by {reduction.name}")
        own = tensor.detach().coalesce()
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        parts: list[torch.Tensor] = [own.indices().t(), own.values()]

        def exchange(group: Group, tag: Tag) -> None:
            joined = []
            for part in parts:
                rooms = [part.new_empty((int(count), *part.shape[1:]), device="cpu") for count in counts]
                _gathering(flat(part), [flat(room) for room in rooms])(group, tag)
                joined.append(torch.cat(rooms))
            indices, values = joined
            values = reduction.wide(values)
            total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()
            reduction.finish(total, self.size)
            made.values.append(total.to(tensor.dtype))

        what = told(tensor, f"all_reduce {reduction.name} of sparse ", f" ({tensor.sparse_dim()} sparse dimensions)")
        made.steps.append((f"lengths of an {what}", _gathering(torch.tensor([own.values().shape[0]]), counts)))
        made.steps.append((what, exchange))

    def reduce(self, tensors: Tensors, op: Any, root: int) -> Operation:
        """The same for one rank; the others keep what they have."""
        made = Operation("reduce", list(tensors))
        for tensor in tensors:
            reduction, values = reducing(op, tensor.dtype), flat(tensor)
            out = values if self.rank == root else torch.empty_like(values)
            what = told(tensor, f"reduce {reduction.name} of ", f" to rank {root}")
            made.add(values, what, reduction.all_reduce(values, out))
        return made

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], op: Any) -> Operation:
        """``outputs[i]`` = the reduction of what every rank holds at ``inputs[i][this rank]``."""
        made = Operation("reduce_scatter", list(outputs))
        for out, tensors in zip(outputs, inputs, strict=True):
            self._check_list(tensors, out, "input")
            lengths = [tensor.numel() for tensor in tensors]
            # Shorter ones are filled up: the groups scatter equal parts.
            joined = torch.zeros(self.size, max(lengths), dtype=out.dtype)
            for row, tensor in zip(joined, tensors, strict=True):
                row[: tensor.numel()].copy_(flat(tensor))
            reduction, reduced = reducing(op, out.dtype), torch.empty(max(lengths), dtype=out.dtype)
            what = f"reduce_scatter {reduction.name} of {lengths} {name_of(out.dtype)}"
            made.add(reduced[: out.numel()], what, reduction.reduce_scatter(joined.view(-1), reduced))
        return made

    def reduce_scatter_single(self, outputs: Tensors, inputs: Tensors, op: Any) -> Operation:
        """The same with the ranks' equal parts one after the other in ``inputs[i]``."""
        made = Operation("reduce_scatter", list(outputs))
        for out, tensor in zip(outputs, inputs, strict=True):
            self._check_parts(tensor, out, "reduce_scatter")
            reduction, room = reducing(op, out.dtype), room_for(out)
            what = told(out, f"reduce_scatter {reduction.name} of {self.size} × ")
            made.add(room, what, reduction.reduce_scatter(flat(tensor), room))
        return made

    def all_gather(self, outputs: Sequence[Tensors], inputs: Tensors) -> Operation:
        """``outputs[i][r]`` = rank r's ``inputs[i]``."""
        made = Operation("all_gather", [tensor for tensors in outputs for tensor in tensors])
        for outs, tensor in zip(outputs, inputs, strict=True):
            self._check_list(outs, tensor, "output")
            rooms = [room_for(out) for out in outs]
            made.values += rooms
            what = f"all_gather of {[out.numel() for out in outs]} {name_of(tensor.dtype)}"
            made.steps.append((what, _gathering(flat(tensor), rooms)))
        return made

    def all_gather_single(self, outputs: Tensors, inputs: Tensors) -> Operation:
        """``outputs[i]`` = every rank's ``inputs[i]``, one after the other."""
        made = Operation("all_gather", list(outputs))
        for out, tensor in zip(outputs, inputs, strict=True):
            self._check_parts(out, tensor, "all_gather")
            room = room_for(out)
            step = _gathering(flat(tensor), room.view(self.size, -1).unbind())
            made.add(room, told(tensor, f"all_gather of {self.size} × "), step)
        return made

    def gather(self, outputs: Sequence[Tensors], tensor: torch.Tensor, root: int) -> Operation:
        """``outputs[0][r]`` of the root = rank r's ``tensor``; the other ranks give none."""
        outs = list(outputs[0]) if self.rank == root else []
        nothing = torch.empty(0, dtype=tensor.dtype)
        if self.rank == root:
            self._check_list(outs, tensor, "output")
            for out in outs:
                _check_like(out, tensor)
        rooms = [room_for(out) for out in outs]
        sources = [flat(tensor) if rank == root else nothing for rank in range(self.size)]
        step = self._exchanging(sources, rooms or [nothing] * self.size)
        return Operation("gather", outs, [(told(tensor, "gather of ", f" to rank {root}"), step)], rooms)

    def scatter(self, out: torch.Tensor, inputs: Sequence[Tensors], root: int) -> Operation:
        """``out`` = what the root holds at ``inputs[0][this rank]``; the other ranks give none."""
        nothing = torch.empty(0, dtype=out.dtype)
        sources = [nothing] * self.size
        if self.rank == root:
            self._check_list(inputs[0], out, "input")
            for tensor in inputs[0]:
                _check_like(tensor, out)
            sources = [flat(tensor) for tensor in inputs[0]]
        room = room_for(out)
        step = self._exchanging(sources, [room if rank == root else nothing for rank in range(self.size)])
        return Operation("scatter", [out], [(told(out, "scatter of ", f" from rank {root}"), step)], [room])

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Operation:
        """``outputs[r]`` = what rank r holds at ``inputs[this rank]``."""
        self._check_count(outputs, "output")
        self._check_count(inputs, "input")
        rooms = [room_for(out) for out in outputs]
        return self._all_to_all(list(outputs), rooms, rooms, [flat(tensor) for tensor in inputs])

    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, out_rows: Sequence[int], rows: Sequence[int]
    ) -> Operation:
        """The same with the parts one after the other. ``out_rows`` from each rank, ``rows`` for each; none: equal
        parts."""
        room, values = room_for(out), flat(tensor)
        rooms, sources = self._split(room, out, out_rows), self._split(values, tensor, rows)
        if out_rows or rows:
            return self._all_to_all([out], [room], rooms, sources)
        _check_like(out, tensor)
        what = told(tensor, "all_to_all of ", " in equal parts")
        return Operation("all_to_all", [out], [(what, self._exchanging(sources, rooms))], [room])

    def _all_to_all(
        self, outputs: list[torch.Tensor], values: list[torch.Tensor], rooms: Tensors, sources: Tensors
    ) -> Operation:
        """With lengths that only the two ranks concerned know: they are compared first."""
        _check_like(rooms[self.rank], sources[self.rank])
        sent = torch.tensor([source.numel() for source in sources])
        every = [torch.empty_like(sent) for _ in range(self.size)]
        run = self._exchanging(sources, rooms)

        def exchange(group: Group, tag: Tag) -> None:
            for rank, (room, theirs) in enumerate(zip(rooms, every, strict=True)):
                if room.numel() != int(theirs[self.rank]):  # of another rank: the own ones were compared before
                    raise CollectiveError(
                        f"rank {rank} sends {int(theirs[self.rank]):,} elements to rank {self.rank}, which expects "
                        f"{room.numel():,}: split sizes of an all_to_all have to match",
                        rank,
                    )
            run(group, tag)

        name = name_of(sources[0].dtype)
        steps: list[Step] = [(f"lengths of an all_to_all of {name}", _gathering(sent, every))]
        return Operation("all_to_all", outputs, [*steps, (f"all_to_all of {name}", exchange)], values)

    def _exchanging(self, sources: Tensors, rooms: Tensors) -> Run:
        """Source r goes to rank r, and what rank r sends comes into room r. A source in the way of what comes is copied
        before."""
        ends = [(room.data_ptr(), room.data_ptr() + room.nbytes) for room in rooms]
        low, high = min(start for start, _ in ends), max(stop for _, stop in ends)
        moved = []
        for rank, source in enumerate(sources):
            start, stop = source.data_ptr(), source.data_ptr() + source.nbytes
            if start < high and low < stop:
                others = ends if rank != self.rank else [*ends[:rank], *ends[rank + 1 :]]
                if any(start < last and first < stop for first, last in others):
                    source = source.clone()
            moved.append(movable(source))
        places = [movable(room) for room in rooms]
        return lambda group, tag: group.all_to_all(moved, places, tag)

    def _split(self, values: torch.Tensor, tensor: torch.Tensor, rows: Sequence[int]) -> Sequence[torch.Tensor]:
        """The ranks' parts of the flat values of a tensor."""
        num_rows = tensor.shape[0] if tensor.dim() else 1
        if not rows:
            if num_rows % self.size:
                raise ConfigurationError(
                    f"{num_rows:,} rows cannot be split evenly over {self.size} ranks; give split sizes"
                )
            rows = [num_rows // self.size] * self.size
        self._check_count(rows, "split size")
        if sum(rows) != num_rows:
            raise ConfigurationError(f"expected split sizes that add up to {num_rows:,} rows, got {list(rows)}")
        each = tensor.numel() // num_rows if num_rows else 0
        parts: Sequence[torch.Tensor] = values.split([count * each for count in rows])
        return parts

    def _check_count(self, given: Sequence[Any], what: str) -> None:
        if len(given) != self.size:
            raise ConfigurationError(f"expected {self.size} {what}s, one for each rank, got {len(given)}")

    def _check_list(self, tensors: Tensors, own: torch.Tensor, what: str) -> None:
        """One for each rank, this rank's like its counterpart."""
        self._check_count(tensors, what)
        _check_like(tensors[self.rank], own)

    def _check_parts(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> None:
        if whole.numel() != part.numel() * self.size or whole.dtype != part.dtype:
            raise ConfigurationError(
                f"expected {self.size} × {told(part)} in {what} of {self.size} ranks, got {told(whole)}"
            )


def _limited(step: Run, timeout_s: float, group: Group, tag: Tag) -> None:
    usual, group.timeout_s = group.timeout_s, timeout_s
    try:
        step(group, tag)
    finally:
        group.timeout_s = usual


def _in_inference_mode(run: Callable[[Tag], None], tag: Tag) -> None:
    with torch.inference_mode():
        run(tag)


def _check_like(tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.numel() != other.numel() or tensor.dtype != other.dtype:
        raise ConfigurationError(f"expected tensors of {told(other)}, got one of {told(tensor)}")


def _broadcasting(values: torch.Tensor, root: int) -> Run:
    return lambda group, tag: group.broadcast(movable(values), root, tag)


def _gathering(values: torch.Tensor, rooms: Tensors) -> Run:
    return lambda group, tag: group.all_gather(movable(values), [movable(room) for room in rooms], tag)
