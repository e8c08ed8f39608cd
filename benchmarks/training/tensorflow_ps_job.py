"""The peer: TensorFlow's ParameterServerStrategy. Runs in TensorFlow's own environment, one process a role.

``python -m benchmarks.training.tensorflow_ps_job WORKLOAD WARMUP_STEPS TIMED_STEPS`` with TF_CONFIG in the environment.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any

import numpy as np

from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.tensorflow_models import make_dataset, make_variables, mean_loss
from benchmarks.training.workloads import LEARNING_RATE, WORKLOADS, Workload
from benchmarks.window import between, read_counters

tf: Any = importlib.import_module("tensorflow")

STEPS_PER_CALL = {"cnn": 16, "dense": 4, "sparse": 16, "tables": 2}
"""Steps in one scheduled function, like Keras' steps_per_execution; these were measured best, and
more with 26 tables take minutes to build."""


def coordinate(workload: Workload, warmup_steps: int, timed_steps: int, resolver: Any) -> None:
    """The chief: builds the variables, schedules the steps, times them."""
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        max_shards=resolver.cluster_spec().num_tasks("ps")
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = make_variables(workload)
    parts = [part for variable in variables for part in getattr(variable, "variables", [variable])]

    def one_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(workload, variables, inputs, labels)
        for part, gradient in zip(parts, tape.gradient(loss, parts), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                part.scatter_sub(tf.IndexedSlices(LEARNING_RATE * gradient.values, gradient.indices))
            else:
                tf.raw_ops.ResourceApplyGradientDescent(var=part.handle, alpha=LEARNING_RATE, delta=gradient)
        return loss

    steps_per_call = math.gcd(STEPS_PER_CALL[workload.name], warmup_steps, timed_steps)

    def some_steps(iterator: Any) -> Any:
        return tf.stack([strategy.run(one_step, args=next(iterator)) for _ in range(steps_per_call)])

    step = tf.function(some_steps)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: make_dataset(workload)))

    def train(num_steps: int) -> list[float]:
        results = [coordinator.schedule(step, args=(iterator,)) for _ in range(num_steps // steps_per_call)]
        coordinator.join()
        return [float(loss) for result in results for loss in result.fetch()]

    losses = train(warmup_steps)
    begin = read_counters(root_pid())
    losses += train(timed_steps)
    window = between(begin, read_counters(root_pid()))
    write_steps(len(losses) - warmup_steps)
    finite = all(bool(np.isfinite(part.numpy()).all()) for part in parts)
    write_result(window, losses, finite, None, {"tensorflow": tf.__version__})


def main() -> None:
    """Plays the role that TF_CONFIG names; servers run until they are ended."""
    workload = WORKLOADS[sys.argv[1]]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
        server = tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc", config=config
        )
        server.join()
    coordinate(workload, int(sys.argv[2]), int(sys.argv[3]), resolver)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
