"""Process groups whose ranks are threads of this process and meet in a store of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from stratagem.cluster.communication import CommunicationOptions
from stratagem.distributed.forming import form
from stratagem.distributed.process_group import LaneProcessGroup

T = TypeVar("T")
TIMEOUT_S = 20.0
JOIN_S = 500.0


@contextlib.contextmanager
def process_groups(
    size: int, transport: Any = "auto", timeout_s: float = TIMEOUT_S
) -> Iterator[list[LaneProcessGroup]]:
    """Every rank's group."""
    options = CommunicationOptions(transport=transport, chunk_bytes=1 << 16, timeout_seconds=timeout_s)
    store, ranks = HashStore(), list(range(size))
    with futures.ThreadPoolExecutor(size) as pool:
        made = list(pool.map(lambda rank: form(store, rank, ranks, TIMEOUT_S, options), ranks))
        try:
            yield made
        finally:
            list(pool.map(lambda group: group.shutdown(), made))


def on_every_rank(groups: Sequence[LaneProcessGroup], run: Callable[[LaneProcessGroup], T]) -> list[T]:
    """What ``run`` gives each rank; all run at once."""
    with futures.ThreadPoolExecutor(len(groups)) as pool:
        return [each.result(JOIN_S) for each in [pool.submit(run, group) for group in groups]]
