"""The peer: TensorFlow's MultiWorkerMirroredStrategy. Runs in TensorFlow's own environment, one process a worker.

``python -m benchmarks.training.tensorflow_ring_job WORKLOAD WARMUP_STEPS TIMED_STEPS`` with TF_CONFIG set.
"""

from __future__ import annotations

import importlib
import math
import sys
import zlib
from typing import Any

import numpy as np

from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.tensorflow_models import make_dataset, make_variables, mean_loss
from benchmarks.training.workloads import LEARNING_RATE, WORKLOADS, Workload
from benchmarks.window import between, read_counters

tf: Any = importlib.import_module("tensorflow")

STEPS_PER_CALL = {"cnn": 16, "dense": 1}
"""Steps in one call of a ``tf.function``, like Keras' steps_per_execution: cnn gains up to a third, dense nothing."""


def train(workload: Workload, warmup_steps: int, timed_steps: int, strategy: Any) -> None:
    """Warms up, times, reports; every worker runs this. Steps are counted over all workers."""
    num_workers = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = make_variables(workload)

    def one_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(workload, variables, inputs, labels)
        gradients = tape.gradient(loss, variables)
        summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for variable, gradient in zip(variables, summed, strict=True):
            local = strategy.experimental_local_results(variable)[0]
            tf.raw_ops.ResourceApplyGradientDescent(var=local.handle, alpha=LEARNING_RATE / num_workers, delta=gradient)
        return loss

    steps_per_call = math.gcd(STEPS_PER_CALL[workload.name], warmup_steps // num_workers, timed_steps // num_workers)

    def some_steps(iterator: Any) -> Any:
        return tf.stack([strategy.run(one_step, args=next(iterator)) for _ in range(steps_per_call)])

    step = tf.function(some_steps, autograph=False)
    rank = strategy.cluster_resolver.task_id
    iterator = iter(make_dataset(workload).skip(rank))  # each worker its own batches, one after another

    def run(num_steps: int) -> list[float]:
        return [float(loss) for _ in range(num_steps // num_workers // steps_per_call) for loss in step(iterator)]

    losses = run(warmup_steps)
    begin = read_counters(root_pid())
    timed_losses = run(timed_steps)
    window = between(begin, read_counters(root_pid()))
    arrays = [strategy.experimental_local_results(variable)[0].numpy() for variable in variables]
    write_steps(len(timed_losses), zlib.crc32(b"".join(array.tobytes() for array in arrays)))
    if rank == 0:
        finite = all(bool(np.isfinite(array).all()) for array in arrays)
        write_result(window, losses + timed_losses, finite, None, {"tensorflow": tf.__version__})


def main() -> None:
    """Joins, trains."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    train(WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]), strategy)


if __name__ == "__main__":
    main()
