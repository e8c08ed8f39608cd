"""The ``ps`` benchmark: parameter-server training of two models by three systems."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from benchmarks import machine
from benchmarks.runner import Case, Sample, Value
from benchmarks.training import jobs
from benchmarks.training.result import JobResult
from benchmarks.training.workloads import Workload

NUM_WORKERS = 2
NUM_PS = 2


def ps_cases(workload: Workload, tf_python: str | None) -> list[Case]:
    """The systems that take turns on one workload.

    Args:
        workload: what to train.
        tf_python: interpreter of an environment with TensorFlow; None leaves the peer out.
    """
    ours = functools.partial(jobs.run_stratagem, workload, NUM_WORKERS, NUM_PS)
    cases = [_case("stratagem", "grpc", workload, NUM_WORKERS, NUM_PS, ours)]
    if tf_python is not None:
        peer = functools.partial(jobs.run_tensorflow, workload, NUM_WORKERS, NUM_PS, tf_python)
        cases.append(_case("tensorflow", "grpc", workload, NUM_WORKERS, NUM_PS, peer))
    alone = functools.partial(jobs.run_alone, workload)
    return [*cases, _case("torch alone", None, workload, 1, 0, alone)]


def to_sample(result: JobResult, workload: Workload) -> Sample:
    """The metrics of one checked window."""
    steps_per_s = result.num_steps / result.elapsed_s
    return {
        "worker_steps_per_s": steps_per_s,
        "examples_per_s": steps_per_s * workload.batch_size,
        "exposed_comm": result.exposed_comm,
        "bytes_per_step": result.loopback_bytes / result.num_steps,
        "cpu_s_per_step": result.cpu_s / result.num_steps,
    }


def _case(
    system: str, lane: str | None, workload: Workload, num_workers: int, num_ps: int, run: Callable[[], JobResult]
) -> Case:
    identity: dict[str, Value] = {
        "benchmark": "ps",
        "system": system,
        "workload": workload.name,
        "lane": lane,
        "workers": num_workers,
        "ps": num_ps,
    }

    def measure() -> tuple[Sample, Mapping[str, str]]:
        result = run()
        result.check(workload.timed_steps)
        own = {} if system == "tensorflow" else machine.library_versions()
        return to_sample(result, workload), {**own, **result.versions}

    return Case(identity, measure)
