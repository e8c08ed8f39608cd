"""train_and_evaluate in every task of a cluster: a small net, or weights that count how often each example was seen."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    FinalExporter,
    ModeKeys,
    RunConfig,
    TrainSpec,
    get_or_create,
    train_and_evaluate,
)
from tests.cluster.scripts import faults

NUM_EXAMPLES = 96
BATCH_SIZE = 12


def input_fn(mode: ModeKeys) -> DataLoader[Any]:
    """Examples: their inputs and numbers; their classes."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_EXAMPLES, 7, generator=generator)
    rows = [({"x": x[row], "number": row}, int(x[row, 0] > 0)) for row in range(NUM_EXAMPLES)]
    return DataLoader(rows, BATCH_SIZE, shuffle=mode == ModeKeys.TRAIN)  # type: ignore[arg-type]


def input_of_its_place(mode: ModeKeys, input_context: sg.InputContext | None = None) -> DataLoader[Any]:
    """As TensorFlow's documents write it; where the chief leases, it is told of the only pipeline."""
    assert input_context is None or input_context.num_input_pipelines == 1
    return input_fn(mode)


def net_fn(features: Mapping[str, torch.Tensor], labels: Any, mode: ModeKeys) -> EstimatorSpec:
    """A net with momenta."""
    width = 20 if mode == ModeKeys.EVAL and "--wider-evaluation" in sys.argv else 16
    net = get_or_create("net", lambda: nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 2)))
    logits = net(features["x"])
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=logits)
    loss = nn.functional.cross_entropy(logits, labels)
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, loss=loss, metrics={"accuracy": ("accuracy", logits, labels)})
    optimizer = get_or_create("optimizer", lambda: torch.optim.Adam(net.parameters(), 1e-2))
    return EstimatorSpec(mode, loss=loss, optimizer=optimizer)


class Rows(nn.Module):
    """A table beside dense weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = sg.nn.Embedding(NUM_EXAMPLES, 4)
        self.dense = nn.Linear(11, 2)

    def forward(self, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.dense(torch.cat([self.table(features["number"]), features["x"]], 1))
        return logits


def table_fn(features: Mapping[str, torch.Tensor], labels: Any, mode: ModeKeys) -> EstimatorSpec:
    """A table, and an optimizer whose state begins with more than zeros."""
    net = get_or_create("net", Rows)
    loss = nn.functional.cross_entropy(net(features), labels)
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, loss=loss)
    make = functools.partial(torch.optim.Adagrad, net.parameters(), 0.1, initial_accumulator_value=0.1)
    return EstimatorSpec(mode, loss=loss, optimizer=get_or_create("optimizer", make))


class Counts(nn.Module):
    """A number for each example, which each update with the example raises by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_EXAMPLES, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        counts: torch.Tensor = self.table(numbers)
        return counts


def count_fn(features: Mapping[str, torch.Tensor], labels: Any, mode: ModeKeys) -> EstimatorSpec:
    """Counts the examples."""
    counts = get_or_create("counts", Counts)(features["number"])
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=counts)
    loss = -counts.mean()
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, loss=loss)
    modules = get_or_create("counts", Counts)
    optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(modules.parameters(), float(BATCH_SIZE)))
    return EstimatorSpec(mode, loss=loss, optimizer=optimizer)


def with_faults(model_fn: Callable[..., EstimatorSpec]) -> Callable[..., EstimatorSpec]:
    """Makes the faults of the schedule happen before the steps of a worker."""
    steps: Iterator[int] = iter(range(-1, 1 << 30))  # the first call creates the model

    def function(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        if mode == ModeKeys.TRAIN:
            faults.at_step(str(getattr(sg.get_strategy(), "task", "worker:0")), next(steps))
        return model_fn(features, labels, mode)

    return function


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--save-steps", type=int, default=8)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--strategy")
    parser.add_argument("--strategy-first", action="store_true")
    parser.add_argument("--place", action="store_true")
    parser.add_argument("--wider-evaluation", action="store_true", help="another net in mode EVAL")
    options = parser.parse_args()
    distribute = (lambda: sg.strategy_from_environment(options.strategy)) if options.strategy else None
    config = RunConfig(
        model_dir=options.model_dir,
        seed=3,
        save_checkpoints_steps=options.save_steps,
        save_summary_steps=4,
        train_distribute=sg.strategy_from_environment() if options.strategy_first else distribute,
    )
    model_fn = count_fn if options.count else table_fn if options.table else net_fn
    estimator = Estimator(with_faults(model_fn), config=config)
    evaluated = train_and_evaluate(
        estimator,
        TrainSpec(input_of_its_place if options.place else input_fn, options.max_steps),
        EvalSpec(
            input_fn,
            steps=None,
            start_delay_secs=0,
            throttle_secs=0,
            exporters=() if options.table else FinalExporter(),
        ),
    )
    if evaluated is not None:
        (options.model_dir / "evaluated.json").write_text(json.dumps(evaluated.results))


if __name__ == "__main__":
    main()
