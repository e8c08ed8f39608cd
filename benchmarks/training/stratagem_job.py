"""Our own worker: ``stratagem run … stratagem_job.py WORKLOAD WARMUP_STEPS TIMED_STEPS``.

The end of an epoch is a meeting of all workers: the window lies between the ends of the warm-up and of the timed epoch.
"""

from __future__ import annotations

import sys
from importlib import metadata

import torch

import stratagem as sg
from benchmarks.training.result import root_pid, write_result, write_steps
from benchmarks.training.torch_models import make_loader, make_model, make_step, weights_finite
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS
from benchmarks.window import between, read_counters
from stratagem.worker.runtime import active_runtime

NUM_SHARDS = 2
"""Every large variable is cut in two, one half a ps; TensorFlow gets the same partitioner."""


def main() -> None:
    """Warms up, times, reports; every worker runs this."""
    workload, warmup_steps, timed_steps = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(SEED)
    strategy = sg.ParameterServerStrategy(variable_partitioner=sg.MinSizePartitioner(max_shards=NUM_SHARDS))
    with strategy.scope():
        model = make_model(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = strategy.prepare(model, optimizer)
    train_step = make_step(model, optimizer)
    warmup = strategy.distribute_dataset(make_loader(workload, warmup_steps))
    timed = strategy.distribute_dataset(make_loader(workload, timed_steps))

    losses = [float(strategy.reduce_mean(strategy.run(train_step, args=(batch,)))) for batch in warmup]
    runtime = active_runtime()
    assert runtime is not None, f"{type(strategy).__name__} has joined no cluster; start this with stratagem run"
    step_s, exposed_s = runtime.meter.total_s, runtime.meter.total_exposed_s
    begin = read_counters(root_pid())
    timed_losses = [float(strategy.reduce_mean(strategy.run(train_step, args=(batch,)))) for batch in timed]
    window = between(begin, read_counters(root_pid()))
    write_steps(len(timed_losses))
    if sg.is_lead():
        timed_s = runtime.meter.total_s - step_s
        exposed_comm = (runtime.meter.total_exposed_s - exposed_s) / timed_s if timed_s else None
        versions = {"torch": torch.__version__, "stratagem": metadata.version("stratagem")}
        write_result(window, losses + timed_losses, weights_finite(model), exposed_comm, versions)


if __name__ == "__main__":
    main()
