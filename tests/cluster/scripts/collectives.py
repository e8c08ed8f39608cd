"""All-reduces in a ring of real processes: many of them, or one that a death or a stop interrupts.

soak NUM SEED: random sizes with random delays; resources are counted after a warm-up and at the end.
break BYTES ACTION: rank 1 kills itself, stops itself or takes its network down in the middle of an all-reduce; the
others write what they got.
leave: rank 1 makes fewer collectives than the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

import stratagem as sg

WARM_UP = 300


def resources() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    process = psutil.Process()
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "memfd_mappings": sum("memfd:" in line for line in maps.splitlines()),
        "resident_bytes": process.memory_info().rss,
    }


def soak(strategy: sg.MultiWorkerMirroredStrategy, num: int, seed: int, out: Path) -> None:
    common, own = random.Random(seed), random.Random(seed + 1 + strategy.communicator.rank)
    size, rank = strategy.communicator.size, strategy.communicator.rank
    before: dict[str, int] = {}
    for number in range(num):
        if number == min(WARM_UP, num // 2):
            before = resources()
        length = common.choice([0, 1, 7, 1000, common.randrange(20_000), common.randrange(200_000)])
        if own.random() < 0.01:
            time.sleep(own.random() * 0.005)
        tensor = torch.full((length,), float(rank + number % 5))
        result = strategy.communicator.all_reduce(tensor)
        expected = sum(other + number % 5 for other in range(size))
        assert bool((result == expected).all()), f"all_reduce {number} of {length} elements is wrong"
    Path(f"{out}.{rank}").write_text(json.dumps({"before": before, "after": resources(), "done": num}))


def break_off(strategy: sg.MultiWorkerMirroredStrategy, num_bytes: int, action: str, out: Path) -> None:
    communicator = strategy.communicator
    arena = communicator.arena(num_bytes)
    source, result = (part.view(torch.float32) for part in (arena.source, arena.result))
    source.fill_(1.0)
    begun = communicator.position.ordinal
    if communicator.rank == 1:

        def die() -> None:
            while communicator.position.ordinal < begun + 4:
                time.sleep(0)
            time.sleep(0.002)  # well inside: the whole all-reduce takes ten times as long
            Path(f"{out}.fault").write_text(json.dumps({"at": time.time(), "position": str(communicator.position)}))
            if action == "dark":  # the link of this host's namespace
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            else:
                os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

        threading.Thread(target=die, daemon=True).start()
    num_done = 0
    try:
        for _ in range(100):
            communicator.step += 1
            communicator.all_reduce(source, out=result)
            num_done += 1
    except sg.CollectiveError as error:
        news = {"error": str(error), "at": time.time(), "done": num_done}
        try:
            communicator.barrier()
        except sg.CollectiveError as again:
            news["again"] = str(again)
        Path(f"{out}.{communicator.rank}").write_text(json.dumps(news))
        sys.exit(7)


def leave(strategy: sg.MultiWorkerMirroredStrategy, out: Path) -> None:
    communicator = strategy.communicator
    for _ in range(3 if communicator.rank == 1 else 5):
        communicator.step += 1
        communicator.all_reduce(torch.ones(10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["soak", "break", "leave"])
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    strategy = sg.MultiWorkerMirroredStrategy()
    if options.mode == "soak":
        soak(strategy, int(options.arguments[0]), int(options.arguments[1]), options.out)
    elif options.mode == "break":
        break_off(strategy, int(options.arguments[0]), options.arguments[1], options.out)
    else:
        leave(strategy, options.out)


if __name__ == "__main__":
    main()
