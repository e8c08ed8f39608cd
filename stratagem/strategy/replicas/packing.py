"""Many tensors as a few flat ones, so that a reduction has few messages, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


def pack_sizes(num_elements: int, num_packs: int) -> list[int]:
    """Elements of each pack: equal ones, the last takes the remainder too (the rule of ``tf.distribute``)."""
    size = num_elements // num_packs
    return [size] * (num_packs - 1) + [num_elements - size * (num_packs - 1)]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Flat tensors to be reduced, and what is needed to take them apart again."""

    packs: list[list[torch.Tensor]]
    """By pack, then by replica: flat tensors of one length and dtype. No pack is empty unless all tensors are."""
    _groups: list[tuple[list[int], int]]
    """The tensors that lie in a row of packs, and how many packs that is."""
    _shapes: list[torch.Size]

    def unpack(self, reduced: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """By tensor, then by replica: what the packs have become. Results of one replica may share a storage."""
        results: dict[int, list[torch.Tensor]] = {}
        first = 0
        for members, num_packs in self._groups:
            rows = reduced[first : first + num_packs]
            first += num_packs
            flats = [parts[0] if num_packs == 1 else torch.cat(parts) for parts in zip(*rows, strict=True)]
            counts = [self._shapes[index].numel() for index in members]
            pieces = [flat.split(counts) for flat in flats]
            for place, index in enumerate(members):
                results[index] = [piece[place].view(self._shapes[index]) for piece in pieces]
        return [results[index] for index in range(len(self._shapes))]


def pack(per_tensor: Sequence[Sequence[torch.Tensor]], num_packs: int) -> Packed:
    """Flattens and concatenates each replica's tensors, dtype by dtype, and splits the whole into ``num_packs``.

    Args:
        per_tensor: by tensor, then by replica; dense.
        num_packs: 0: every tensor is a pack of its own.
    """
    groups: dict[object, list[int]] = {}
    for index, tensors in enumerate(per_tensor):
        groups.setdefault(tensors[0].dtype if num_packs else index, []).append(index)
    packs: list[list[torch.Tensor]] = []
    sizes_of: list[tuple[list[int], int]] = []
    for members in groups.values():
        rows = list(zip(*([tensor.detach().reshape(-1) for tensor in per_tensor[i]] for i in members), strict=True))
        flats = [row[0] if len(row) == 1 else torch.cat(row) for row in rows]
        sizes = [size for size in pack_sizes(flats[0].numel(), num_packs or 1) if size] or [0]
        packs += [list(parts) for parts in zip(*(flat.split(sizes) for flat in flats), strict=True)]
        sizes_of.append((members, len(sizes)))
    return Packed(packs, sizes_of, [tensors[0].shape for tensors in per_tensor])
