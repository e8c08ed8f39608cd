"""Several hosts: ranks of a host reduce in shared memory, one of them joins the hosts' ring, the result spreads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.worker.ring.group import HOST, Arena, Breakable, Tag
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.ring_group import RingGroup


def _over_flat(name: str) -> Callable[..., None]:
    def collective(self: TwoLevelGroup, *arguments: Any) -> None:
        with self._inside(range(self.size)):
            getattr(self.flat, name)(*arguments)

    return collective


class TwoLevelGroup(Breakable):
    """Implements :class:`stratagem.worker.ring.group.Group` with two groups for all_reduce, and a third for the rest.

    An element crosses the network once for each host, not once for each rank. Every rank of a host gets what its
    leader has, so all ranks end with identical bits as the ring's do.

    Args:
        host: the ranks of this host; its rank 0 is the leader. This object owns all three groups.
        ring: the leaders; None on every other rank.
        flat: all ranks; gathers, scatters, broadcasts and barriers go over it.
        host_ranks: global rank of each rank of ``host``.
        leader_ranks: global rank of each rank of ``ring``.
    """

    device = HOST

    def __init__(
        self,
        host: HostGroup,
        ring: RingGroup | None,
        flat: RingGroup,
        *,
        host_ranks: Sequence[int],
        leader_ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self.name = f"{host.name} inside hosts, {flat.name} between them"
        self.rank = flat.rank
        self.size = flat.size
        self.host = host
        self.ring = ring
        self.flat = flat
        self._host_ranks = tuple(host_ranks)
        self._leader_ranks = tuple(leader_ranks)

    @property
    def timeout_s(self) -> float:
        return self.flat.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        for group in (self.host, self.ring, self.flat):
            if group is not None:
                group.timeout_s = seconds

    def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        """The host's: the ranks of a host reduce in it, and its leader's ring sends from it."""
        with self._inside(self._host_ranks):
            return self.host.arena(num_bytes, tag, in_place)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        with self._inside(self._host_ranks):
            self.host.reduce(source, out if self.host.rank == 0 else None, 0, op, tag)
        if self.ring is not None:
            with self._inside(self._leader_ranks):
                self.ring.all_reduce(out, out, op, tag)
        with self._inside(self._host_ranks):
            self.host.broadcast(out, 0, tag)

    reduce_scatter, all_gather = _over_flat("reduce_scatter"), _over_flat("all_gather")
    broadcast, all_to_all, barrier = _over_flat("broadcast"), _over_flat("all_to_all"), _over_flat("barrier")

    def waiting_on(self) -> int | None:
        if (flat := self.flat.waiting_on()) is not None:
            return flat
        if self.ring is not None and (leader := self.ring.waiting_on()) is not None:
            return self._leader_ranks[leader]
        mate = self.host.waiting_on()
        return None if mate is None else self._host_ranks[mate]

    @contextlib.contextmanager
    def _inside(self, ranks: Sequence[int]) -> Iterator[None]:
        """An error of one inner group breaks all of them, and names a global rank. ``ranks``: global rank of each rank
        of the inner group."""
        self.check()
        try:
            yield
        except CollectiveError as error:
            rank = None if error.rank is None else ranks[error.rank]
            where = "" if len(ranks) == self.size else f" (counted from 0 among the ranks {', '.join(map(str, ranks))})"
            raise self.break_off(type(error)(f"{error}{where}", rank)) from None

    def _end(self, error: CollectiveError) -> None:
        for group in (self.flat, self.ring, self.host):
            if group is not None:
                group.close(str(error))
