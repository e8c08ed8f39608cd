"""Three ranks in a loop of one collective; the last is killed or stopped. Prints what the others raise, as JSON.

Run as a program: the ranks are forked from it, where torch is loaded and nothing has been started.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, GatherOptions, ReduceOptions, ScatterOptions

from stratagem.cluster.communication import CommunicationOptions
from stratagem.distributed.forming import form
from stratagem.distributed.process_group import LaneProcessGroup

SIZE, VICTIM, LENGTH = 3, 2, 120_000
TIMEOUT_S = 5.0


def gather(group: LaneProcessGroup) -> dist.Work:
    options = GatherOptions()
    options.rootRank = 0
    outs = [[torch.empty(LENGTH) for _ in range(SIZE)]] if group.rank() == 0 else []
    return group.gather(outs, [torch.ones(LENGTH)], options)


def scatter(group: LaneProcessGroup) -> dist.Work:
    options = ScatterOptions()
    options.rootRank = 1
    inputs = [[torch.ones(LENGTH) for _ in range(SIZE)]] if group.rank() == 1 else []
    return group.scatter([torch.empty(LENGTH)], inputs, options)


def reduce(group: LaneProcessGroup) -> dist.Work:
    options = ReduceOptions()
    options.rootRank = 0
    return group.reduce([torch.ones(LENGTH)], options)


def batch(group: LaneProcessGroup) -> dist.Work:
    """As ``dist.batch_isend_irecv``: to and from each other rank, then all are waited for."""
    others = [rank for rank in range(SIZE) if rank != group.rank()]
    works = [group.recv([torch.empty(LENGTH)], other, 0) for other in others]
    works += [group.send([torch.ones(LENGTH)], other, 0) for other in others]
    for work in works[:-1]:
        work.wait()
    return works[-1]


def messages(group: LaneProcessGroup) -> dist.Work:
    """Around the ring: every rank waits for a message."""
    group.send([torch.ones(LENGTH)], (group.rank() + 1) % SIZE, 0)
    return group.recv([torch.empty(LENGTH)], (group.rank() - 1) % SIZE, 0)


CALLS: dict[str, Callable[[LaneProcessGroup], dist.Work]] = {
    "all_reduce": lambda group: group.allreduce([torch.ones(LENGTH)]),
    "reduce_scatter": lambda group: group._reduce_scatter_base(torch.empty(LENGTH), torch.ones(LENGTH * SIZE)),
    "all_gather": lambda group: group._allgather_base(torch.empty(LENGTH * SIZE), torch.ones(LENGTH)),
    "broadcast": lambda group: group.broadcast([torch.ones(LENGTH)], 1),
    "all_to_all": lambda group: group.alltoall_base(torch.empty(LENGTH * SIZE), torch.ones(LENGTH * SIZE), [], []),
    "gather": gather,
    "scatter": scatter,
    "reduce": reduce,
    "barrier": lambda group: group.barrier(),
    "batch": batch,
    "messages": messages,
}


def loop(rank: int, name: str, transport: str, path: str, told: Connection) -> None:
    """A rank: says "begun" after a few rounds, then what ended it."""
    options = CommunicationOptions(transport=transport, timeout_seconds=TIMEOUT_S, chunk_bytes=1 << 16)  # type: ignore[arg-type]
    group = form(FileStore(path, SIZE), rank, list(range(SIZE)), 60.0, options)
    try:
        for turn in range(1_000_000):
            CALLS[name](group).wait()
            if turn == 3:
                told.send("begun")
    except Exception as error:
        told.send(f"{type(error).__name__}: {error}")
    group.shutdown()
    os._exit(0)


def lose(name: str, transport: str, how: signal.Signals) -> dict[str, object]:
    """One case."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks, ends = [], []
        for rank in range(SIZE):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, name, transport, os.path.join(folder, "store"), there)
            ranks.append(context.Process(target=loop, args=arguments))
            ranks[-1].start()
            there.close()
            ends.append(here)
        began = [end.recv() if wait([end], 60.0) else "nothing" for end in ends]
        pid = ranks[VICTIM].pid
        assert began == ["begun"] * SIZE and pid is not None, began
        os.kill(pid, how)
        lost_at = time.monotonic()
        said = []
        for end in ends[:VICTIM]:
            said.append(end.recv() if wait([end], 60.0) else "nothing")
        took_s = time.monotonic() - lost_at
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        return {"name": name, "transport": transport, "how": how.name, "said": said, "took_s": took_s}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        name, transport, how = case.split(",")
        print(json.dumps(lose(name, transport, signal.Signals[how])), flush=True)
