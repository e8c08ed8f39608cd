"""``python -m tests.fuzz --frames 1000000``: mutated messages against live servers, which must not notice.

Nothing may crash, hang or grow, no call may end in an error that nobody thought of, and an honest client must be served
all the while. Prints what came of the messages, and the figures.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.attacks import UNEXPECTED, Outcomes, Requests, Sockets, Streams
from tests.fuzz.vitals import Vitals, Witness

ROOT = Path(__file__).parents[2]
BLOCK = 1000
SHARES = {"requests": 0.92, "streams": 0.06, "sockets": 0.02}
MAX_GROWTH_BYTES = 96 << 20
"""Of resident memory, after the first tenth: allocators keep what was freed."""
MAX_MORE_THREADS = 80
MAX_MORE_FDS = 120


@contextlib.contextmanager
def target(log: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process under attack, and the addresses of its servers; its log goes to a file."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=ROOT,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.stdin.close()
                process.wait(20)
            process.kill()
            process.wait()
            process.stdout.close()


def fuzz(num_frames: int, seed: int, log: Path) -> dict[str, object]:
    """Attacks; returns the figures.

    Raises:
        AssertionError: the servers noticed.
    """
    rng = random.Random(seed)
    outcomes = {name: Outcomes() for name in SHARES}
    started = time.monotonic()
    with target(log) as (process, addresses):
        witness = Witness(addresses)
        attacks: dict[str, Requests | Streams | Sockets] = {
            "requests": Requests(addresses),
            "streams": Streams(addresses),
            "sockets": Sockets(addresses),
        }
        begin: Vitals | None = None
        try:
            for first in range(0, num_frames, BLOCK):
                for name, share in SHARES.items():
                    count = round(min(BLOCK, num_frames - first) * share)
                    outcomes[name] += attacks[name].run(rng, count)
                witness.check()
                if begin is None and first + BLOCK >= num_frames // 10:
                    begin = Vitals.of(process.pid)
                assert process.poll() is None, f"the target ended with {process.poll()}; see {log}"
        finally:
            for attack in attacks.values():
                attack.close()
            witness.finish()
        end = Vitals.of(process.pid)
    assert process.returncode == 0, f"the target ended with {process.returncode}; see {log}"
    assert begin is not None
    figures: dict[str, object] = {
        "frames": sum(count.total() for count in outcomes.values()),
        "seconds": round(time.monotonic() - started, 1),
        "honest_rounds": witness.num_rounds,
        "begin": vars(begin),
        "end": vars(end),
        "log_bytes": log.stat().st_size,
        "outcomes": {name: dict(count.most_common()) for name, count in outcomes.items()},
    }
    check(begin, end, outcomes, figures)
    return figures


def check(begin: Vitals, end: Vitals, outcomes: dict[str, Outcomes], figures: dict[str, object]) -> None:
    """Fails when something grew, or a server's code failed."""
    together = sum(outcomes.values(), collections.Counter[str]())
    failed = {name: number for name, number in together.items() if name.startswith(tuple(c.name for c in UNEXPECTED))}
    assert not failed, f"calls ended in errors that nobody thought of: {failed}"
    assert end.rss_bytes - begin.rss_bytes <= MAX_GROWTH_BYTES, figures
    assert end.num_threads - begin.num_threads <= MAX_MORE_THREADS, figures
    assert end.num_fds - begin.num_fds <= MAX_MORE_FDS, figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000, help="messages to send")
    parser.add_argument("--seed", type=int, default=0, help="the same seed sends the same messages")
    log = Path(tempfile.gettempdir(), "fuzz.log")
    parser.add_argument("--log", type=Path, default=log, help="where the target's log goes")
    options = parser.parse_args()
    print(json.dumps(fuzz(options.frames, options.seed, options.log), indent=1))


if __name__ == "__main__":
    main()
