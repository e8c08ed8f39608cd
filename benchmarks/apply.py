"""The ``apply`` benchmark: one server-side optimizer update on one thread, against what the memory can do.

The gradient lies in pieces of 1 MiB, as the frames of the grpc lane leave it. The roofline is the best memory traffic
of two passes over tensors of the same size in the same sample: ``copy_`` (8 bytes an element) and ``add_`` (12).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.runner import Case, Sample, Value
from stratagem.ps.shard_group import ShardGroup
from stratagem.ps.specs import GroupSpec, ShardSpec

NUM_PARAMETERS = 25_185_290
"""As many as the dense workload has."""
PIECE_ELEMENTS = (1 << 20) // 4
BYTES_PER_PARAMETER = {"SGD": 12, "Adam": 28}
"""Memory traffic of one fp32 update: weights and slots read and written, gradient read."""
HYPER_PARAMETERS: Mapping[str, Mapping[str, Any]] = {"SGD": {"lr": 0.01}, "Adam": {"lr": 0.001}}
NUM_UPDATES = 10
"""In one sample; the fastest counts, so that a scheduler's hiccup does not."""
NUM_COMPARED = 4096
"""Elements compared with torch's own optimizer after every sample."""


class WrongUpdateError(Exception):
    """The parameter server computed something else than torch."""


def apply_cases(num_parameters: int = NUM_PARAMETERS) -> list[Case]:
    """One case an optimizer."""
    return [_case(name, num_parameters) for name in BYTES_PER_PARAMETER]


def _case(optimizer: str, num_parameters: int) -> Case:
    identity: dict[str, Value] = {
        "benchmark": "apply",
        "system": "stratagem",
        "optimizer": optimizer,
        "parameters": num_parameters,
        "threads": 1,
    }
    return Case.of_ours(identity, lambda: _measure(optimizer, num_parameters))


def _measure(optimizer: str, num_parameters: int) -> Sample:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gradient = torch.randn(num_parameters, generator=torch.Generator().manual_seed(0))
        roofline_gbs = memory_roofline_gbs(gradient)
        apply_s, cpu_s = _time_updates(optimizer, gradient)
    finally:
        torch.set_num_threads(threads)
    gbs = num_parameters * BYTES_PER_PARAMETER[optimizer] / apply_s / 1e9
    return {
        "apply_ms": apply_s * 1e3,
        "gbs": gbs,
        "roofline_gbs": roofline_gbs,
        "of_roofline": gbs / roofline_gbs,
        "cpu_s_per_apply": cpu_s / NUM_UPDATES,
    }


def _time_updates(optimizer: str, gradient: torch.Tensor) -> tuple[float, float]:
    """Seconds of the fastest update, and CPU seconds of all of them, after one that allocates."""
    count = gradient.numel()
    shard = ShardSpec("weights", (count,), first_row=0, num_rows=count, offset=0)
    group = ShardGroup(GroupSpec(0, optimizer, torch.float32, (shard,)))
    group.initialized = True
    parts = [(start, gradient[start : start + PIECE_ELEMENTS]) for start in range(0, count, PIECE_ELEMENTS)]
    hyper = [HYPER_PARAMETERS[optimizer]]

    def update() -> None:
        group.prepare(parts, [True], hyper)
        group.apply(parts, [True])

    update()
    cpu_begin = time.process_time()
    apply_s = fastest_s(update, NUM_UPDATES)
    cpu_s = time.process_time() - cpu_begin
    _compare(group.weights, optimizer, gradient)
    return apply_s, cpu_s


def _compare(weights: torch.Tensor, optimizer: str, gradient: torch.Tensor) -> None:
    """Refuses weights that torch's own optimizer does not give."""
    expected = torch.zeros(min(NUM_COMPARED, gradient.numel()), requires_grad=True)
    reference = getattr(torch.optim, optimizer)([expected], **HYPER_PARAMETERS[optimizer])
    for _ in range(NUM_UPDATES + 1):
        expected.grad = gradient[: expected.numel()].clone()
        reference.step()
    if not torch.allclose(weights[: expected.numel()], expected.detach(), rtol=1e-5, atol=1e-6):
        worst = float((weights[: expected.numel()] - expected.detach()).abs().max())
        raise WrongUpdateError(f"expected the weights of torch.optim.{optimizer}, they differ by up to {worst}")


def memory_roofline_gbs(like: torch.Tensor) -> float:
    """Memory traffic, GB/s, of the better of a copy and an in-place sum on tensors like ``like``, on one thread."""
    source, target = torch.ones_like(like), torch.ones_like(like)
    num_bytes = like.numel() * like.element_size()
    copy_gbs = 2 * num_bytes / fastest_s(lambda: target.copy_(source), 5) / 1e9
    add_gbs = 3 * num_bytes / fastest_s(lambda: target.add_(source), 5) / 1e9
    return max(copy_gbs, add_gbs)


def fastest_s(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
