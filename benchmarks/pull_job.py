"""The worker of the ``pull`` benchmark: ``stratagem run … pull_job.py WORKLOAD``."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

import stratagem as sg
from benchmarks.job_files import result_path
from benchmarks.pull import PullResult
from benchmarks.training.torch_models import make_model
from benchmarks.training.workloads import SEED, WORKLOADS
from benchmarks.window import loopback_bytes
from stratagem.worker.push.layout import Layout, VariableSpec
from stratagem.worker.push.remote_tables import create_or_attach
from stratagem.worker.push.variables import RemoteVariables, pull
from stratagem.worker.runtime import WorkerRuntime, active_runtime

NUM_COLD = 12
NUM_UNCHANGED = 200
CHUNK_BYTES = 1 << 20
FIRST_GROUP = 1000
"""Apart from the groups that a strategy would number."""


def main() -> None:
    """Puts a model's weights on the ps, then pulls them both ways."""
    torch.manual_seed(SEED)
    strategy = sg.strategy_from_environment()
    runtime = active_runtime()
    assert runtime is not None, f"{type(strategy).__name__} has joined no cluster; start this with stratagem run"
    weights = [parameter.detach() for parameter in make_model(WORKLOADS[sys.argv[1]]).parameters()]
    given = [weight.clone() for weight in weights]
    layout = _halves(weights, runtime.cluster.num_ps)
    variables = _variables(runtime, layout, weights)
    create_or_attach([variables], runtime.clients, runtime.is_lead, runtime.config.start_timeout_s)
    for weight in weights:
        weight.zero_()

    colds = [_variables(runtime, layout, weights) for _ in range(NUM_COLD)]
    first, *others = [functools.partial(pull, [cold], runtime.clients) for cold in colds]
    cold_s, cold_bytes = _time(first, others)
    equal = all(torch.equal(weight, original) for weight, original in zip(weights, given, strict=True))
    again = functools.partial(pull, [variables], runtime.clients)
    again()
    unchanged_s, unchanged_bytes = _time(again, [again] * NUM_UNCHANGED)
    result = PullResult(cold_s, unchanged_s, cold_bytes, unchanged_bytes, equal)
    result_path().write_text(json.dumps(dataclasses.asdict(result)))


def _halves(weights: list[torch.Tensor], num_ps: int) -> Layout:
    """Every weight cut into equal runs of rows, one a ps."""
    specs = [VariableSpec(f"weight{i}", tuple(w.shape), w.dtype, FIRST_GROUP) for i, w in enumerate(weights)]
    rows = []
    for spec in specs:
        bounds = [spec.shape[0] * ps // num_ps for ps in range(num_ps + 1)]
        rows.append(
            [(ps, bounds[ps], bounds[ps + 1] - bounds[ps]) for ps in range(num_ps) if bounds[ps + 1] > bounds[ps]]
        )
    return Layout(specs, rows, CHUNK_BYTES)


def _variables(runtime: WorkerRuntime, layout: Layout, weights: list[torch.Tensor]) -> RemoteVariables:
    """Remote variables that know no version yet."""
    return RemoteVariables(runtime.clients, layout, weights, "")


def _time(warm_up: Callable[[], bool], pulls: Sequence[Callable[[], bool]]) -> tuple[float, float]:
    """Median seconds and fewest bytes over the loopback of ``pulls``, after one that is not counted.

    The fewest, because the loopback counts what other jobs of the machine send as well.
    """
    warm_up()
    times, num_bytes = [], []
    for call in pulls:
        begin_bytes = loopback_bytes()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        num_bytes.append(loopback_bytes() - begin_bytes)
    return statistics.median(times), min(num_bytes)


if __name__ == "__main__":
    main()
