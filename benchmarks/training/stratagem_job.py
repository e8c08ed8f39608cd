"""Our own worker: ``stratagem run … stratagem_job.py WORKLOAD WARMUP_STEPS TIMED_STEPS [LANE]``, with ps or in a ring.

The end of an epoch is a meeting of all workers: the window lies between the ends of the warm-up and of the timed epoch.
"""

from __future__ import annotations

import sys
from importlib import metadata

import torch

import stratagem as sg
from benchmarks.collectives.stratagem_job import check_lane
from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.torch_models import (
    make_loader,
    make_model,
    make_step,
    memory_format,
    weights_checksum,
    weights_finite,
)
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS
from benchmarks.window import between, read_counters
from stratagem.worker.runtime import active_runtime

NUM_SHARDS = 2
"""Every large variable is cut in two, one half a ps; TensorFlow gets the same partitioner."""


def main() -> None:
    """Warms up, times, reports; every worker runs this."""
    workload, warmup_steps, timed_steps = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(SEED)
    strategy = make_strategy(sys.argv[4] if len(sys.argv) > 4 else None)
    with strategy.scope():
        model = make_model(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=workload.momentum)
    model, optimizer = strategy.prepare(model, optimizer, memory_format=memory_format(workload))
    train_step = make_step(model, optimizer)
    num_in_sync = strategy.num_replicas_in_sync
    joined = workload.of_all(num_in_sync)
    warmup = strategy.distribute_dataset(make_loader(joined, warmup_steps // num_in_sync))
    timed = strategy.distribute_dataset(make_loader(joined, timed_steps // num_in_sync))

    def step(batch: object) -> float:
        return float(strategy.local_results(strategy.run(train_step, args=(batch,)))[0])

    losses = [step(batch) for batch in warmup]
    runtime = active_runtime()
    assert runtime is not None, f"{type(strategy).__name__} has joined no cluster; start this with stratagem run"
    before = runtime.meter.report()
    begin = read_counters(root_pid())
    timed_losses = [step(batch) for batch in timed]
    window = between(begin, read_counters(root_pid()))
    write_steps(len(timed_losses), weights_checksum(model) if num_in_sync > 1 else 0)
    if sg.is_lead():
        after = runtime.meter.report()
        timed_s, exposed_s = (after[key] - before[key] for key in ("step_time_s", "exposed_communication_s"))
        exposed_comm = exposed_s / timed_s if timed_s else None
        versions = {"torch": torch.__version__, "stratagem": metadata.version("stratagem")}
        write_result(window, losses + timed_losses, weights_finite(model), exposed_comm, versions)


def make_strategy(lane: str | None) -> sg.Strategy:
    """A ring over ``lane``, or parameter servers without one."""
    if lane is None:
        return sg.ParameterServerStrategy(variable_partitioner=sg.MinSizePartitioner(max_shards=NUM_SHARDS))
    strategy = sg.MultiWorkerMirroredStrategy()
    check_lane(strategy.communicator.group.name, lane)
    return strategy


if __name__ == "__main__":
    main()
