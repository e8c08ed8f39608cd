"""What a job of all ranks measured, read and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.collectives.loop import RankResult, SizeResult
from benchmarks.collectives.pattern import WrongSumError
from benchmarks.job_files import rank_path
from benchmarks.runner import Sample


def read_ranks(result: Path, num_ranks: int) -> list[RankResult]:
    """What every rank wrote."""
    texts = [rank_path(result, rank).read_text() for rank in range(num_ranks)]
    return [
        RankResult([SizeResult(**size) for size in fields["sizes"]], fields["versions"])
        for fields in map(json.loads, texts)
    ]


def to_samples(ranks: Sequence[RankResult]) -> tuple[list[Sample], Mapping[str, str]]:
    """One sample a size.

    ``median_s`` is that of the slowest rank; ``cpu_s_per_gb`` adds up the CPU seconds of all ranks, for each GB (1e9
    bytes) of the tensor.

    Raises:
        WrongSumError: ranks hold different bits, or did not measure the same.
    """
    return [_sample(same_size) for same_size in zip(*(rank.sizes for rank in ranks), strict=True)], ranks[0].versions


def bus_bytes(num_ranks: int, num_bytes: int) -> float:
    """Bytes that every rank has to send, and to receive, for one all-reduce: 2 (N-1) / N of the tensor."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def _sample(ranks: Sequence[SizeResult]) -> Sample:
    num_bytes = ranks[0].num_bytes
    if len({(rank.num_bytes, rank.num_iterations) for rank in ranks}) > 1:
        raise WrongSumError(f"expected the same all-reduces on every rank, they made {list(ranks)}")
    if len(sums := {rank.checksum for rank in ranks}) > 1:
        raise WrongSumError(f"expected the same bits on every rank at {num_bytes} bytes, got checksums {sorted(sums)}")
    median_s = max(rank.median_s for rank in ranks)
    return {
        "median_s": median_s,
        "busbw_gbs": bus_bytes(len(ranks), num_bytes) / median_s / 1e9,
        "cpu_s_per_gb": sum(rank.cpu_s for rank in ranks) / (num_bytes / 1e9),
    }
