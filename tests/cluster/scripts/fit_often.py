"""Makes many random calls of ``fit`` in one job, under any strategy, and writes what came of each on every worker.

Of one seed the calls are the same under every strategy and on every worker. Row i of a parameter moves by a
share of the learning rate when example i is in an update, whatever the order: it shows how often each was applied, also
where updates are asynchronous. Metrics show which examples an epoch has counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.training.callbacks import Callback

NUM_EXAMPLES = 120
"""Of calls that end as they should; those that an exception ends have others, behind these."""


class Sums(torchmetrics.Metric):
    """How many examples there were, and the sum of a power of their numbers."""

    total: torch.Tensor

    def __init__(self, power: int) -> None:
        super().__init__()
        self._power = power
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Any, ids: torch.Tensor) -> None:
        self.total += (ids**self._power).sum()

    def compute(self) -> torch.Tensor:
        return self.total


class Net(nn.Module):
    """Knows the features of the examples; a batch is their numbers."""

    features: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(2 * NUM_EXAMPLES, 5))
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.applied = nn.Parameter(torch.zeros(2 * NUM_EXAMPLES))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(self.features[ids])[:, 0], self.applied[ids]


def loss(outputs: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    predicted, applied = outputs
    return nn.functional.mse_loss(predicted, (ids % 5).float()) - applied.mean()


class Broken(Exception):
    """Ends a ``fit``."""


class Breaks(Callback):
    """Raises, or says stop, at a place of a ``fit``."""

    def __init__(self, place: str, number: int) -> None:
        self._place = place
        self._number = number
        self._num_tests = 0

    def _reached(self, place: str, number: int) -> None:
        if (place, number) == (self._place, self._number):
            raise Broken(f"{place} {number}")

    def on_train_begin(self, logs: Any = None) -> None:
        self._reached("fit", 0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._reached("batch", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._reached("step", batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._reached("validation", self._num_tests)
        self._num_tests += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._reached("epoch", epoch)
        if self._place == "stop" and epoch >= self._number:
            self.model.stop_training = True


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of ``fit``."""

    num_examples: int
    batch_size: int
    epochs: int
    steps_per_epoch: int | None
    shuffle: bool
    is_dataset: bool
    """The script distributes the data itself and goes through them twice."""
    validation: str
    place: str
    """Where it breaks off; "": nowhere."""
    number: int
    is_peeked: bool
    """Somebody looks at the first batch before."""

    @property
    def first(self) -> int:
        return 0 if self.place in ("", "stop") else NUM_EXAMPLES


def draw(rng: random.Random) -> Call:
    """A batch has at least two examples: then there is a part of it for each of two workers."""
    while True:
        num_examples, batch_size = rng.randint(8, NUM_EXAMPLES), rng.randint(2, 40)
        if num_examples % batch_size != 1:
            break
    num_batches = -(-num_examples // batch_size)
    place = rng.choice(["", "", "", "", "stop", "stop", "fit", "batch", "step", "epoch", "validation"])
    return Call(
        num_examples,
        batch_size,
        epochs=rng.randint(1, 3),
        steps_per_epoch=rng.choice([None, rng.randint(1, min(3 * num_batches, 24))]),
        shuffle=rng.random() < 0.5,
        is_dataset=rng.random() < 0.25,
        validation="data" if place == "validation" else rng.choice(["", "", "data", "split", "iterable", "steps"]),
        place=place,
        number=0 if place == "fit" else rng.randint(0, 2),
        is_peeked=rng.random() < 0.25,
    )


def fit(model: sg.Model, strategy: sg.Strategy, call: Call, alone: bool = False) -> list[Any]:
    """What the calls of ``fit`` gave."""
    ids = torch.arange(call.first, call.first + call.num_examples)
    given: dict[str, Any] = {"x": ids, "y": ids, "batch_size": call.batch_size, "shuffle": call.shuffle}
    if call.is_dataset or call.is_peeked:
        loader = DataLoader(TensorDataset(ids, ids), batch_size=call.batch_size, shuffle=call.shuffle)
        dataset = strategy.distribute_dataset(loader)
        if call.is_peeked:
            peeked = iter(dataset)
            next(peeked, None)
            peeked.close()
        if call.is_dataset:
            given = {"x": dataset}
    if call.validation == "split" and not call.is_dataset and call.num_examples * 0.75 % call.batch_size >= 2:
        given["validation_split"] = 0.25
    elif call.validation:
        batches = [(part, part) for part in torch.arange(0, NUM_EXAMPLES, 3).split(7)]
        ids = torch.cat([part for part, _ in batches])
        given["validation_data"] = batches if call.validation == "iterable" else (ids, ids)
        given["validation_steps"] = 1 if call.validation == "steps" else None
    found: list[Any] = []
    for _ in range(1 + call.is_dataset):
        callbacks = [] if alone and not _is_last(strategy) else [Breaks(call.place, call.number)]
        try:
            history = model.fit(
                **given, epochs=call.epochs, steps_per_epoch=call.steps_per_epoch, callbacks=callbacks, verbose=0
            )
            found.append({"epochs": history.epoch, **history.history})
        except Broken as error:
            found.append({"broken": str(error)})
    return found


def _is_last(strategy: sg.Strategy) -> bool:
    assert isinstance(strategy, sg.ParameterServerStrategy)
    return strategy.task.index == 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--fits", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy")
    parser.add_argument("--devices")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    strategy = sg.strategy_from_environment(options.strategy, options.devices)
    with strategy.scope():
        model = sg.Model(Net())
    metrics = {"number": Sums(0), "sum": Sums(1), "squares": Sums(2)}
    model.compile(lambda parameters: torch.optim.SGD(parameters, 1e-2), loss, metrics)
    calls = []
    ids = torch.arange(NUM_EXAMPLES)
    for number in range(options.fits):
        call = draw(rng)
        print(f"{number} {call}", flush=True)
        calls.append({"call": str(call), "is_broken": call.first > 0, "fits": fit(model, strategy, call)})
        if rng.random() < 0.2:
            calls[-1]["evaluation"] = model.evaluate(ids, ids, batch_size=16, verbose=0, return_dict=True)
    news: dict[str, Any] = {"calls": calls, "num_steps": model.num_steps}
    news["applied"] = model.module.state_dict()["applied"][:NUM_EXAMPLES].tolist()
    if isinstance(strategy, sg.ParameterServerStrategy):
        broken = Call(60, 8, 4, 5, True, False, "data", "epoch", 1, False)
        whole = dataclasses.replace(broken, place="")
        for steps in (5, None):  # one worker alone breaks off: the others go on, and all meet in the next call
            fit(model, strategy, dataclasses.replace(broken, steps_per_epoch=steps), alone=True)
            news[f"after {steps}"] = fit(model, strategy, whole)
    Path(f"{options.out}.{getattr(strategy, 'task', 'worker:0')}").write_text(json.dumps(news))


if __name__ == "__main__":
    main()
