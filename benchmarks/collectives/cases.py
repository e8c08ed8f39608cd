"""The ``allreduce`` benchmark: our lanes beside gloo and TensorFlow's RING."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from benchmarks.collectives import jobs
from benchmarks.collectives.loop import RankResult
from benchmarks.collectives.result import to_samples
from benchmarks.runner import Case, Identity, Sample

LANES = ("shm", "tcp", "grpc")


def allreduce_cases(
    num_workers: int,
    sizes: Sequence[int],
    lanes: Sequence[str],
    wire: str,
    *,
    tls: bool,
    gloo: bool,
    tf_python: str | None,
) -> list[Case]:
    """The systems that take turns; each measures all sizes in one job.

    Args:
        num_workers: ranks, each a process on this machine.
        sizes: bytes of each tensor.
        lanes: lanes of ours.
        wire: element type between our ranks; the peers send float32. The shm lane has no wire and takes float32 alone.
        tls: whether our tcp lane is measured under TLS too.
        gloo: whether the peer gloo takes part.
        tf_python: interpreter of an environment with TensorFlow; None leaves the peer out.
    """
    case = functools.partial(_case, num_workers, sizes)
    cases = []
    for lane in lanes:
        of_lane = "float32" if lane == "shm" else wire
        cases.append(
            case("stratagem", lane, of_lane, functools.partial(jobs.run_stratagem, num_workers, sizes, lane, of_lane))
        )
    if tls:
        run = functools.partial(jobs.run_stratagem, num_workers, sizes, "tcp", "float32", tls=True)
        cases.append(case("stratagem", "tcp+tls", "float32", run))
    if gloo:
        cases.append(case("gloo", "tcp", "float32", functools.partial(jobs.run_gloo, num_workers, sizes)))
    if tf_python is not None:
        run = functools.partial(jobs.run_tensorflow, num_workers, sizes, tf_python)
        cases.append(case("tensorflow", "grpc", "float32", run))
    return cases


def _case(
    num_workers: int, sizes: Sequence[int], system: str, lane: str, wire: str, run: Callable[[], list[RankResult]]
) -> Case:
    identities: list[Identity] = [
        {"benchmark": "allreduce", "system": system, "lane": lane, "wire": wire, "n": num_workers, "bytes": num_bytes}
        for num_bytes in sizes
    ]

    def measure() -> tuple[Sequence[Sample], Mapping[str, str]]:
        return to_samples(run())

    return Case(identities, measure)
