"""The peer: TensorFlow's RING over gRPC, one process a worker, in TensorFlow's own environment.

``python -m benchmarks.collectives.tensorflow_job SIZES`` with TF_CONFIG in the environment.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.collectives.loop import measure_and_write
from benchmarks.collectives.pattern import Array
from benchmarks.collectives.sizes import parse_sizes

tf: Any = importlib.import_module("tensorflow")


class TensorFlowBuffer:
    """A tensor that is reduced inside a ``tf.function``; TensorFlow allocates the result."""

    def __init__(self, reduce: Any) -> None:
        self._reduce = reduce
        self._source: Any = None
        self._sum: Any = None

    def fill(self, values: Array) -> None:
        self._source, self._sum = tf.constant(values), None

    def all_reduce(self) -> None:
        self._sum = self._reduce(self._source)

    def result(self) -> Array:
        array: Array = self._sum.numpy()
        return array


class TensorFlowRing:
    """MultiWorkerMirroredStrategy's collective, called as a training step calls it."""

    wire = "float32"

    def __init__(self, strategy: Any) -> None:
        resolver = strategy.cluster_resolver
        self.rank, self.size = resolver.task_id, resolver.cluster_spec().num_tasks("worker")

        def reduce(source: Any) -> Any:
            context = tf.distribute.get_replica_context()
            placed = tf.identity(source)  # an argument of a function has no device yet; copies nothing
            return context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

        self._reduce = tf.function(lambda source: strategy.run(reduce, args=(source,)), autograph=False)

    def buffer(self, num_elements: int) -> TensorFlowBuffer:
        return TensorFlowBuffer(self._reduce)


def main() -> None:
    """Joins, measures."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    measure_and_write(TensorFlowRing(strategy), parse_sizes(sys.argv[1]), {"tensorflow": tf.__version__})


if __name__ == "__main__":
    main()
