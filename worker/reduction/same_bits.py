"""Whether all ranks still have the same weights and settings: two numbers in the tail of each backward."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.ring.agreement import gather_json, without_addresses
from stratagem.worker.ring.communicator import Communicator

WINDOW = 16384
"""Elements that are looked at in one backward, round and round: about 20 µs on one core."""
MAX_PIECES = 4
"""Tensors that are looked at in one backward."""
NUM_WHOLE = 1 << 20
"""Of so many elements on a CPU on, torch adds windows: to add wider integers it copies all that it is given, which is
twice the memory of a large variable and three times as slow."""
CUDA_EVERY = 16
"""Backwards between two looks at weights on a GPU, because the host waits for them."""
_BITS = 52
"""What a float64 holds exactly, sums with zeros included."""

Optimizers = Callable[[], Sequence[torch.optim.Optimizer]]


@dataclasses.dataclass(eq=False, repr=False)
class SameBits:
    """Checksums of one rank's weights and settings."""

    _parameters: Sequence[torch.nn.Parameter]
    """Those of the reducer, in the order of every rank."""
    _names: Sequence[str]
    _label: str
    _optimizers: Optimizers = lambda: ()
    """Whose settings have to be the same; of none: those of this rank are somebody else's."""

    def __post_init__(self) -> None:
        self.begin_anew()
        self._settings: tuple[list[list[object]], int] = [], 0
        self._views: dict[int, torch.Tensor] = {}
        """Of parameters, by number: their memory as integers, as it was looked at last."""

    def begin_anew(self) -> None:
        """Goes round the weights from the start: those of other ranks do as well."""
        self._index = self._offset = self._num_looks = 0

    def look(self) -> tuple[int, int]:
        """Checksums of the settings and of the next window of the weights; 0: nothing is said this time.

        Every rank has to call it once in each backward.
        """
        self._num_looks += 1
        values = [_settings(optimizer, group) for optimizer in self._optimizers() for group in optimizer.param_groups]
        if values != self._settings[0]:
            self._settings = values, zlib.crc32(without_addresses(repr(values)).encode()) + 1
        is_cuda = bool(self._parameters) and self._parameters[0].device.type == "cuda"
        return self._settings[1], 0 if is_cuda and self._num_looks % CUDA_EVERY else self._next_window()

    def raise_difference(self, communicator: Communicator) -> None:
        """Finds out what differs, and where. Every rank has to call it. Raises ConfigurationError: names the rank and
        what it has. Where only ranks differ that have joined a ring that heals, they alone have it, and the others a
        CollectiveError when those are gone."""
        settings = [
            f"{type(optimizer).__name__}({', '.join(f'{name}={group[name]!r}' for name in _names(optimizer, group))})"
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
        ]
        has_joined = communicator.healing is not None and communicator.healing.num_first > 0
        every = gather_json(communicator, [has_joined, self._label, *map(without_addresses, settings)])
        sums = communicator.all_gather(torch.tensor([sum_of_bits(_flat(parameter)) for parameter in self._parameters]))
        has = [(each[2:], bits.tolist()) for each, bits in zip(every, sums, strict=True)]
        old = [one for each, one in zip(every, has, strict=True) if not each[0]]
        only_joined = bool(old) and all(one == old[0] for one in old) and any(one != old[0] for one in has)
        if only_joined and has[communicator.rank] == old[0]:
            communicator.confirm()  # it breaks, and the ring continues without the others
        raise self._difference([each[1:] for each in every], [one[1] for one in has])

    def _difference(self, every: Sequence[Sequence[str]], sums: Sequence[Sequence[int]]) -> ConfigurationError:
        labels = [each[0] for each in every]
        telling, *rest = itertools.zip_longest(*([each for each in every if each[1:]] or every), fillvalue="none")
        for line in rest:
            if (odd := _odd(line)) is not None:
                usual = 0 if odd else 1
                return ConfigurationError(
                    f"the settings of an optimizer differ, and the replicas would diverge: {telling[usual]} has "
                    f"{line[usual]}, {telling[odd]} has {line[odd]}; set and schedule them alike on every worker (one "
                    "that joins a ring has what the others have of schedulers given to strategy.prepare, of each "
                    "sg.Variable, and of data.epoch)"
                )
        for position, name in enumerate(self._names):
            if (odd := _odd([each[position] for each in sums])) is not None:
                return ConfigurationError(
                    f"the replicas have diverged: {name} of {labels[odd]} has different bits from that of "
                    f"{labels[0 if odd else 1]}. Whatever changes weights must do the same on every worker (a load, a "
                    "clip, a step that one of them left out; noise from a torch.Generator that each step seeds alike); "
                    "on processors of different kinds set ATEN_CPU_CAPABILITY=avx2 for all"
                )
        return ConfigurationError("the replicas have had different weights or settings; they are the same again")

    def _next_window(self) -> int:
        total, left = 0, WINDOW
        for _ in range(min(MAX_PIECES, len(self._parameters))):
            bits = self._bits(self._index)
            size = bits.numel()
            piece = bits if not self._offset and size <= left else bits[self._offset : self._offset + left]
            total = total * 31 + int(piece.sum(dtype=torch.int64))
            num_looked = min(left, size - self._offset)
            left -= num_looked
            self._offset += num_looked
            if self._offset >= size:
                self._index, self._offset = (self._index + 1) % len(self._parameters), 0
            if not left:
                break
        return total % (1 << _BITS) + 1 if self._parameters else 0

    def _bits(self, index: int) -> torch.Tensor:
        parameter, view = self._parameters[index], self._views.get(index)
        if view is None or view.data_ptr() != parameter.data_ptr() or view.numel() != parameter.numel():
            view = self._views[index] = _as_integers(_flat(parameter))
        return view


def checksums(parameters: Sequence[torch.nn.Parameter]) -> tuple[int, ...]:
    """Of the bits of each gradient; 0 where there is none."""
    return tuple(0 if each.grad is None else sum_of_bits(each.grad.to_dense().reshape(-1)) for each in parameters)


def have_same_gradients(parameters: Sequence[torch.nn.Parameter], communicator: Communicator) -> bool:
    """Whether the gradients of ``parameters`` have the same bits on all ranks. Every rank has to call it."""
    mine = torch.tensor(checksums(parameters))
    return len({tuple(each.tolist()) for each in communicator.atomic(lambda: communicator.all_gather(mine))}) == 1


def alike(values: Sequence[float]) -> bool:
    """Whether all ranks that say something say the same."""
    return len({value for value in values if value}) < 2


def _names(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> list[str]:
    """Of its settings. Torch adds defaults to an optimizer that loads a state, and groups do not have those."""
    return [name for name in optimizer.defaults if name in group]


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> list[object]:
    """Numbers and texts; a tensor on a device would have to be waited for."""
    values = [group[name] for name in _names(optimizer, group)]
    return [
        (value.tolist() if value.device.type == "cpu" else None) if isinstance(value, torch.Tensor) else value
        for value in values
    ]


def _flat(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The elements in the order of memory, without a copy if there are no gaps; else those of a dense copy."""
    own = parameter.detach()
    if torch.empty_like(own, device="meta").stride() != own.stride():
        own = own.clone()
    return own.as_strided((own.numel(),), (1,))


def sum_of_bits(flat: torch.Tensor) -> int:
    """Of the bits, as integers: the order in which they are added does not matter."""
    bits = _as_integers(flat)
    if bits.dtype == torch.int64 or bits.device.type != "cpu" or bits.numel() < NUM_WHOLE:
        return int(bits.sum(dtype=torch.int64))
    return sum(int(piece.sum(dtype=torch.int64)) for piece in bits.split(WINDOW))


def _as_integers(flat: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return flat.view(sizes.get(flat.element_size(), torch.int64))


def _odd(values: Sequence[object]) -> int | None:
    """The first that is not what most are; None: all are the same."""
    counts = collections.Counter(values)
    if len(counts) < 2:
        return None
    usual = counts.most_common(1)[0][0]
    return next(index for index, value in enumerate(values) if value != usual)
