"""Cuts a gradient, in its pieces as they arrived, into the runs that one optimizer call can each take at once. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from stratagem.errors import ProtocolError
from stratagem.ps.specs import ShardSpec

Extent = tuple[int, int]
"""First element and number of elements of a piece, in the group's flat tensor."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Contiguous elements of one piece whose shards are alike."""

    piece: int
    start: int
    """First element, in the flat tensor."""
    stop: int
    """One past the last element."""
    shard: int
    """Index of the first shard in it; the others are like it."""


def cut_runs(
    extents: Sequence[Extent], shards: Sequence[ShardSpec], present: Sequence[bool], likeness: Sequence[Hashable]
) -> tuple[Run, ...]:
    """The runs of a gradient. Its pieces lie at ``extents``, in any order; they may cover several shards or a part of
    one. Shards that are not ``present`` are skipped; neighbours of equal ``likeness`` may share a run. ProtocolError:
    pieces overlap, or do not cover a shard that has a gradient; names the variable."""
    order = sorted(range(len(extents)), key=lambda piece: extents[piece])
    runs: list[Run] = []
    covered = [0] * len(shards)
    index = 0
    end = 0
    for piece in order:
        offset, count = extents[piece]
        if not count:
            continue
        if offset < end:
            raise ProtocolError(f"two pieces of a gradient overlap at element {offset}; send each element once")
        end = offset + count
        while index < len(shards) and shards[index].stop <= offset:
            index += 1
        for at in range(index, len(shards)):
            if shards[at].offset >= end:
                break
            start, stop = max(offset, shards[at].offset), min(end, shards[at].stop)
            if not present[at] or start >= stop:
                continue
            covered[at] += stop - start
            last = runs[-1] if runs and runs[-1].piece == piece else None
            if last is not None and last.stop == start and likeness[last.shard] == likeness[at]:
                runs[-1] = dataclasses.replace(last, stop=stop)
            else:
                runs.append(Run(piece, start, stop, at))
    for shard, has_gradient, count in zip(shards, present, covered, strict=True):
        if has_gradient and count != shard.num_elements:
            raise ProtocolError(
                f"expected {shard.num_elements} gradient elements of variable {shard.variable}, got {count}; "
                "stage its frames again, or take it out of the presence mask"
            )
    return tuple(runs)


def covers(extents: Sequence[Extent], shards: Sequence[ShardSpec], present: Sequence[bool]) -> bool:
    """Whether the pieces hold every element of every shard that has a gradient (overlaps do not count as covering)."""
    if len(extents) == 1 and shards and extents[0] == (0, shards[-1].stop):
        return True
    try:
        cut_runs(extents, shards, present, [0] * len(shards))
    except ProtocolError:
        return False
    return True


def presence(mask: bytes, num_shards: int) -> tuple[bool, ...]:
    """Decodes a presence mask: bit i, least significant bit of byte 0 first, is shard i; empty means all.
    ProtocolError: more bytes than there are shards."""
    if not mask:
        return (True,) * num_shards
    if len(mask) > -(-num_shards // 8):
        raise ProtocolError(f"expected a presence mask of {-(-num_shards // 8)} bytes, got {len(mask)}")
    bits = int.from_bytes(mask, "little")
    return tuple(bool(bits >> shard & 1) for shard in range(num_shards))
