"""The workloads as plain numbers, and their data. numpy only: the peers' jobs read this in their own environments."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

LEARNING_RATE = 0.01
"""Of SGD, for every workload and system."""
SEED = 0
"""Of the data and of the initial weights."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with its batch, and how many worker-steps to run."""

    name: str
    example_shape: tuple[int, ...]
    batch_size: int
    num_parameters: int
    warmup_steps: int
    """Worker-steps, summed over the workers, before the clock starts."""
    timed_steps: int
    """Worker-steps, summed over the workers, in the timed window."""
    momentum: float = 0.0
    """Of SGD; with it an optimizer keeps one slot for each parameter."""
    device: str = "cpu"
    """Where the workers of torch compute: "cpu" or "cuda"."""

    def of_all(self, num_workers: int) -> Workload:
        """The same work as one process would see it: batches of all workers joined, and so many times fewer steps.

        Raises:
            ValueError: the steps cannot be divided among the workers.
        """
        if self.warmup_steps % num_workers or self.timed_steps % num_workers:
            raise ValueError(
                f"expected a number of workers that divides {self.warmup_steps} and {self.timed_steps} steps, "
                f"got {num_workers}"
            )
        return dataclasses.replace(
            self,
            batch_size=self.batch_size * num_workers,
            warmup_steps=self.warmup_steps // num_workers,
            timed_steps=self.timed_steps // num_workers,
        )


WORKLOADS = {
    "cnn": Workload("cnn", (1, 28, 28), 64, 347_146, warmup_steps=64, timed_steps=800),
    "dense": Workload("dense", (1024,), 32, 25_185_290, warmup_steps=8, timed_steps=64),
    "charlm": Workload("charlm", (64,), 32, 669_056, warmup_steps=8, timed_steps=64),
    "sparse": Workload("sparse", (8,), 512, 64_000_650, warmup_steps=64, timed_steps=800),
    "tables": Workload("tables", (26,), 512, 4_164_170, warmup_steps=32, timed_steps=160),
}
"""cnn: conv 32 3x3, pool 2, dense 64, 10 classes. dense: MLP 1024-4096-4096-1024-10. ReLU between layers.
charlm: the GPT of ``examples/charlm.py``, windows of 64 bytes of the standard library's source. sparse: the sum of 8
rows of a table of 1,000,000 rows of 64, dense 10 classes; 4,096 ids a step. tables: a row of each of 26 tables of
10,000 rows of 16, dense 10 classes. All steps are multiples of 8, so that 2, 4 or 8 workers divide them."""

EMPTY = Workload("empty", (1,), 1, 1024, warmup_steps=200, timed_steps=2000)
"""One variable of 4 KB whose sum is the loss: a step is what a step costs beside model and bytes."""
WORKLOADS[EMPTY.name] = EMPTY
WIDE = Workload("wide", (4096,), 8, 100_704_266, warmup_steps=4, timed_steps=12, momentum=0.9)
"""Two towers of three dense layers of 4096, and 10 classes: 384 MiB of weights in parts of 64 MiB, and as much
momentum."""
WORKLOADS[WIDE.name] = WIDE
MEDIUM = Workload("medium", (2048,), 8, 25_186_314, warmup_steps=12, timed_steps=48, momentum=0.9)
"""The same towers at half the width: 96 MiB of weights, for many workers on a small machine."""
WORKLOADS[MEDIUM.name] = MEDIUM
TOWERS = (WIDE.name, MEDIUM.name)
CHANNELS_LAST = dataclasses.replace(WORKLOADS["cnn"], name="cnn-channels-last")
"""The cnn with its weights in torch's memory format channels_last, under every system of torch; TensorFlow's cnn has no
other."""
WORKLOADS[CHANNELS_LAST.name] = CHANNELS_LAST

CLASSIFIERS = ("cnn", "dense")
"""Workloads whose examples :func:`make_examples` makes of patterns."""
ON_SERVERS = (*CLASSIFIERS, "sparse", "tables")
"""Workloads of the benchmark with parameter servers; the peers in other environments know these alone."""
ALL_REDUCED = (*CLASSIFIERS, "charlm", CHANNELS_LAST.name)
"""Workloads of the benchmark with an all-reduce."""
BARE = ("sparse", EMPTY.name)
"""Workloads of :mod:`benchmarks.training.bare_job`."""
NUM_CLASSES = 10
TABLE_ROWS, TABLE_WIDTH = 1_000_000, 64
"""Of the workload "sparse"."""
FEATURE_ROWS, FEATURE_WIDTH = 10_000, 16
"""Of each table of the workload "tables"."""


def workload_on(name: str, device: str) -> Workload:
    """A workload of :data:`WORKLOADS` whose workers compute on ``device``."""
    return dataclasses.replace(WORKLOADS[name], device=device)


Arrays = tuple[npt.NDArray[np.float32] | npt.NDArray[np.int64], npt.NDArray[np.int64]]


def make_examples(workload: Workload, num_examples: int) -> Arrays:
    """Seeded examples of a classifier that can be learned: one random pattern a class, plus noise of the same size.

    Returns:
        Inputs ``(num_examples, *example_shape)``, float32, or int64 row numbers of the tables, and labels
        ``(num_examples,)`` int64.
    """
    random = np.random.default_rng(SEED)
    if workload.name in ("sparse", "tables"):
        num_rows = TABLE_ROWS if workload.name == "sparse" else FEATURE_ROWS
        ids = random.integers(0, num_rows, (num_examples, *workload.example_shape))
        return ids, ids[:, 0] % NUM_CLASSES
    width = math.prod(workload.example_shape)
    patterns = random.standard_normal((NUM_CLASSES, width), dtype=np.float32)
    labels = random.integers(0, NUM_CLASSES, num_examples)
    inputs = patterns[labels] + random.standard_normal((num_examples, width), dtype=np.float32)
    return inputs.reshape(num_examples, *workload.example_shape), labels
