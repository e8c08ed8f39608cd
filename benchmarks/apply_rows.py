"""The part of the ``apply`` benchmark about tables: rows that one thread of a ps updates in a second.

A gradient names 2,048 random rows of 64 out of 500,000: what one of two ps gets from a step of the sparse workload.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.apply import WrongUpdateError
from benchmarks.runner import Case, Sample, Value
from stratagem.cluster.initial_rows import InitialRows
from stratagem.ps.shard_group import Parts
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.table_group import TableGroup

NUM_ROWS, WIDTH, ROWS_AN_UPDATE = 500_000, 64, 2048
NUM_UPDATES = 64
HYPER_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "SparseAdam": {"lr": 0.001},
}


def apply_rows_cases() -> list[Case]:
    """One case an optimizer."""
    return [_case(name) for name in HYPER_PARAMETERS]


def _case(optimizer: str) -> Case:
    identity: dict[str, Value] = {
        "benchmark": "apply",
        "system": "stratagem",
        "optimizer": optimizer,
        "rows": ROWS_AN_UPDATE,
        "width": WIDTH,
        "threads": 1,
    }
    return Case.of_ours(identity, lambda: _measure(optimizer))


def _measure(optimizer: str) -> Sample:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return time_updates(optimizer, NUM_ROWS, NUM_UPDATES)
    finally:
        torch.set_num_threads(threads)


def time_updates(optimizer: str, num_rows: int, num_updates: int) -> Sample:
    """Times updates of random rows, and compares the table with torch's sparse optimizer.

    Raises:
        WrongUpdateError: the table is not what torch makes of it.
    """
    shard = ShardSpec("table", (num_rows, WIDTH), 0, num_rows, 0, rows=InitialRows("normal", 0.0, 1.0))
    group = TableGroup(GroupSpec(0, optimizer, torch.float32, (shard,)))
    group.make_values()
    random = np.random.default_rng(0)
    numbers = [np.unique(random.integers(0, num_rows, ROWS_AN_UPDATE)) for _ in range(num_updates)]
    gradient = torch.randn(ROWS_AN_UPDATE, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = group.weights.view(num_rows, WIDTH).clone().requires_grad_()
    pieces = [_piece(some, gradient) for some in numbers]
    hyper = [HYPER_PARAMETERS[optimizer]]
    for piece in pieces:  # the slots' memory is there after that
        group.prepare(piece, [True], hyper)
        group.apply(piece, [True])
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for piece in pieces:
        group.prepare(piece, [True], hyper)
        group.apply(piece, [True])
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    reference = getattr(torch.optim, optimizer)([expected], **HYPER_PARAMETERS[optimizer])
    for some in (*numbers, *numbers):
        rows = torch.from_numpy(some)[None]
        values = gradient[: len(some)]
        expected.grad = torch.sparse_coo_tensor(rows, values, expected.shape, check_invariants=False, is_coalesced=True)
        with torch.sparse.check_sparse_tensor_invariants(False):
            reference.step()
    if not torch.allclose(group.weights.view(num_rows, WIDTH), expected.detach(), rtol=1e-5, atol=1e-5):
        raise WrongUpdateError(f"expected the table that torch.optim.{optimizer} makes with sparse gradients")
    num_changed = sum(len(some) for some in numbers)
    return {"rows_per_s": num_changed / wall_s, "rows_per_cpu_s": num_changed / cpu_s}


def _piece(numbers: np.ndarray[Any, np.dtype[np.int64]], gradient: torch.Tensor) -> Parts:
    rows = gradient[: len(numbers)].reshape(-1).view(torch.uint8)
    return [(0, torch.cat([torch.from_numpy(numbers).view(torch.uint8), rows]))]
