"""The training benchmarks: ``ps`` with parameter servers, ``train`` with an all-reduce, ``fit`` in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from benchmarks import machine
from benchmarks.runner import Case, Sample, Value
from benchmarks.training import jobs
from benchmarks.training.result import JobResult
from benchmarks.training.workloads import BARE, CLASSIFIERS, ON_SERVERS, Workload
from benchmarks.window import ROLES

NUM_WORKERS = 2
NUM_PS = 2
LANES = ("shm", "tcp")
"""Of ``train``, unless it is told others."""
FIT_SYSTEMS = ("torch loop", "strategy loop", "fit", "fit with accuracy")
"""Of ``fit``, in the order of its job."""

Measure = Callable[[], JobResult]


def ps_cases(
    workload: Workload, lanes: Sequence[str], tf_python: str | None, *, tls: bool = False, rtt_s: float = 0.0
) -> list[Case]:
    """The systems that take turns on one workload with parameter servers.

    Args:
        workload: what to train.
        lanes: lanes of ours.
        tf_python: interpreter of an environment with TensorFlow; None leaves the peer out.
        tls: whether each lane is measured under TLS too.
        rtt_s: not 0: the workers are on another host than all others, so far away.
    """
    if rtt_s:
        sample = functools.partial(to_sample, workload=workload, counts_bytes=False)
        case = functools.partial(_case, "ps", workload, sample=sample, rtt_ms=rtt_s * 1e3)
        ours, args = jobs.run_ps_apart, (workload, NUM_WORKERS, NUM_PS)
        cases = [
            case("stratagem", lane, NUM_WORKERS, NUM_PS, functools.partial(ours, *args, lane, rtt_s)) for lane in lanes
        ]
        if tf_python is not None and workload.name in ON_SERVERS:
            peer = functools.partial(jobs.run_tensorflow_ps, *args, tf_python, rtt_s)
            cases.append(case("tensorflow", "grpc", NUM_WORKERS, NUM_PS, peer))
        return cases
    case = functools.partial(_case, "ps", workload)
    run = functools.partial(jobs.run_ps, workload, NUM_WORKERS, NUM_PS)
    cases = [
        case("stratagem", lane + suffix, NUM_WORKERS, NUM_PS, functools.partial(run, lane, tls=bool(suffix)))
        for lane in lanes
        for suffix in (["", "+tls"] if tls else [""])
    ]
    on_cpu = workload.device == "cpu"  # what the peers beside torch have been made for
    if tf_python is not None and workload.name in ON_SERVERS and on_cpu:
        peer = functools.partial(jobs.run_tensorflow_ps, workload, NUM_WORKERS, NUM_PS, tf_python)
        cases.append(case("tensorflow", "grpc", NUM_WORKERS, NUM_PS, peer))
    if workload.name in BARE and on_cpu:
        bare = functools.partial(jobs.run_bare, workload, NUM_WORKERS, NUM_PS)
        cases.append(case("bare sockets", "tcp", NUM_WORKERS, NUM_PS, bare))
    return [*cases, case("torch alone", None, 1, 0, functools.partial(jobs.run_alone, workload))]


def step_cases(lanes: Sequence[str], workload: Workload, *, in_step: bool) -> list[Case]:
    """An empty model with one variable of 4 KB, one worker and one ps: what a step costs beside model and bytes.
    ``in_step``: also of two workers at staleness 0, each of whose steps counts."""
    case = functools.partial(_case, "step", workload, sample=to_step_sample)
    run = functools.partial(jobs.run_ps, workload)
    cases = [case("stratagem", lane, 1, 1, functools.partial(run, 1, 1, lane)) for lane in lanes]
    for lane in lanes if in_step else ():
        together = functools.partial(run, NUM_WORKERS, 1, lane, in_step=True)
        cases.append(case("stratagem in step", lane, NUM_WORKERS, 1, together))
    if workload.device == "cpu":
        cases.append(case("bare sockets", "tcp", 1, 1, functools.partial(jobs.run_bare, workload, 1, 1)))
    return [*cases, case("torch alone", None, 1, 0, functools.partial(jobs.run_alone, workload))]


def train_cases(
    workload: Workload, num_workers: int, lanes: Sequence[str], *, ddp: bool, tf_python: str | None
) -> list[Case]:
    """The systems that take turns on one workload with an all-reduce, and one process alone.

    Args:
        workload: what to train; its steps are divided among the workers.
        num_workers: processes.
        lanes: lanes of ours.
        ddp: whether torch's DistributedDataParallel takes part, over gloo and over our lanes.
        tf_python: interpreter of an environment with TensorFlow; None leaves the peer out.

    Raises:
        ValueError: the workload's steps cannot be divided among the workers.
    """
    workload.of_all(num_workers)
    case = functools.partial(_case, "train", workload)
    cases = [
        case("stratagem", lane, num_workers, 0, functools.partial(jobs.run_ring, workload, num_workers, lane))
        for lane in lanes
    ]
    if ddp:
        for lane in ("gloo", *lanes):
            run = functools.partial(jobs.run_ddp, workload, num_workers, lane=lane)
            cases.append(case("ddp", lane, num_workers, 0, run))
    if tf_python is not None and workload.name in CLASSIFIERS and workload.device == "cpu":
        peer = functools.partial(jobs.run_tensorflow_ring, workload, num_workers, tf_python)
        cases.append(case("tensorflow", "grpc", num_workers, 0, peer))
    return [*cases, case("torch alone", None, 1, 0, functools.partial(jobs.run_alone, workload))]


def fit_cases(workload: Workload) -> list[Case]:
    """A plain loop of torch, the loop of a strategy, and ``Model.fit``, in turns in one process."""

    def measure() -> tuple[Sequence[Sample], Mapping[str, str]]:
        results = jobs.run_fit(workload)
        for result in results:
            result.check(workload.timed_steps)
        return [to_sample(result, workload) for result in results], machine.library_versions()

    return [Case([identity_of("fit", workload, system, None, 1, 0) for system in FIT_SYSTEMS], measure)]


def to_sample(result: JobResult, workload: Workload, *, counts_bytes: bool = True) -> Sample:
    """The metrics of one checked window. ``counts_bytes``: all of them went over this host's loopback."""
    steps_per_s = result.num_steps / result.elapsed_s
    return {
        "worker_steps_per_s": steps_per_s,
        "examples_per_s": steps_per_s * workload.batch_size,
        "exposed_comm": result.exposed_comm,
        "bytes_per_step": result.loopback_bytes / result.num_steps if counts_bytes else None,
        "cpu_s_per_step": result.cpu_s / result.num_steps,
        **{f"{role}_cpu_s_per_step": cpu_s_per_step(result, role) for role in ROLES},
    }


def to_step_sample(result: JobResult) -> Sample:
    """What one step costs, in microseconds; of a role the CPU of all its tasks."""
    by_role = {role: cpu_s_per_step(result, role) for role in ROLES}
    return {
        "step_us": 1e6 * result.elapsed_s / result.num_steps,
        "cpu_us": 1e6 * result.cpu_s / result.num_steps,
        **{f"{role}_cpu_us": None if cpu_s is None else 1e6 * cpu_s for role, cpu_s in by_role.items()},
    }


def cpu_s_per_step(result: JobResult, role: str) -> float | None:
    """CPU seconds a worker-step of all tasks of a role; None: the system has no such role."""
    return result.cpu_s_by_role[role] / result.num_steps if role in result.cpu_s_by_role else None


def _case(
    benchmark: str,
    workload: Workload,
    system: str,
    lane: str | None,
    num_workers: int,
    num_ps: int,
    run: Measure,
    sample: Callable[[JobResult], Sample] | None = None,
    **more: Value,
) -> Case:
    def measure() -> tuple[Sample, Mapping[str, str]]:
        result = run()
        result.check(workload.timed_steps)
        own = {} if system == "tensorflow" else machine.library_versions()
        return sample(result) if sample else to_sample(result, workload), {**own, **result.versions}

    return Case.of_one_row({**identity_of(benchmark, workload, system, lane, num_workers, num_ps), **more}, measure)


def identity_of(
    benchmark: str, workload: Workload, system: str, lane: str | None, num_workers: int, num_ps: int
) -> dict[str, Value]:
    """The columns that name a row of training."""
    return {
        "benchmark": benchmark,
        "system": system,
        "workload": workload.name,
        "lane": lane,
        **({"device": workload.device} if workload.device != "cpu" else {}),
        "workers": num_workers,
        "ps": num_ps,
    }
