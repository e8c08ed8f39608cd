"""Training runs whose numbers are compared with those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.conformance.scenarios.refusals import said
from tests.conformance.scenarios.workload import Batch, Step, Training, Workload, filled, integers, normal, rates_of

Loss = Callable[[nn.Module, Batch], tuple[torch.Tensor, float]]

UNEVEN = 15
"""Examples: in batches of 7 and a last one of 1, whose other shares are empty."""
EVEN = 24
"""Examples: in batches of 12, which 1, 2, 3 and 4 replicas share evenly."""


def net() -> nn.Module:
    """Small, and smooth, so that rounding does not grow."""
    return filled(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))


def rows(num_examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    return normal(num_examples, 5, seed=1), integers(3, num_examples, seed=2)


def cross_entropy(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """A mean over examples."""
    return functional.cross_entropy(model(batch[0]), batch[1]), float(len(batch[1]))


def usual(loss_of: Loss = cross_entropy) -> Step:
    """One model, one optimizer, one step a batch."""

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        model, optimizer = objects[:2]
        optimizer.zero_grad()
        loss, divisor = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss, divisor

    return step


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
}


def optimized(optimizer: str, num_examples: int) -> Workload:
    """The net with one of the optimizers."""
    model = net()
    even = num_examples == EVEN
    return Workload(
        (model, OPTIMIZERS[optimizer](model.parameters())), rows(num_examples), usual(), batch_size=12 if even else 7
    )


sgd = Training(optimized, "sgd", EVEN, name="sgd")
sgd_uneven = Training(optimized, "sgd", UNEVEN, name="sgd_uneven")
momentum = Training(optimized, "momentum", EVEN, name="momentum")
momentum_uneven = Training(optimized, "momentum", UNEVEN, name="momentum_uneven")
adam = Training(optimized, "adam", EVEN, name="adam")
adam_uneven = Training(optimized, "adam", UNEVEN, name="adam_uneven")
adamw = Training(optimized, "adamw", EVEN, name="adamw")
adamw_uneven = Training(optimized, "adamw", UNEVEN, name="adamw_uneven")


class Tied(nn.Module):
    """Input and output share a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.tanh(self.mix(self.table(tokens).mean(1))))
        return found


@Training
def tied() -> Workload:
    model = filled(Tied())
    data = integers(9, UNEVEN, 3, seed=4), integers(9, UNEVEN, seed=5)
    return Workload((model, OPTIMIZERS["momentum"](model.parameters())), data, usual())


class Sometimes(nn.Module):
    """A part that no example uses, one that only examples with the label 2 use, of which few batches have any, and an
    integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.never = nn.Linear(5, 3)
        self.seldom = nn.Linear(5, 3)
        self.number = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        if bool(use.any()):
            y = y + torch.where(use[:, None], self.seldom(x), torch.zeros_like(y))
        return y


@Training
def unused() -> Workload:
    model = filled(Sometimes())
    data = (*rows(UNEVEN), torch.arange(UNEVEN) % 14 == 5)

    def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        return functional.cross_entropy(model(batch[0], batch[2]), batch[1]), float(len(batch[1]))

    return Workload((model, OPTIMIZERS["momentum"](model.parameters())), data, usual(loss_of))


CLIP_NORM = 0.05


@Training
def clip_norm() -> Workload:
    model = net()
    objects = model, OPTIMIZERS["momentum"](model.parameters())
    return Workload(objects, rows(UNEVEN), usual(), prepare={"clip_norm": CLIP_NORM})


@Training
def clipped() -> Workload:
    """Clipped by the step itself."""
    model = net()

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        own, optimizer = objects
        optimizer.zero_grad()
        loss, divisor = cross_entropy(own, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(own.parameters(), CLIP_NORM)
        optimizer.step()
        return loss, divisor

    return Workload((model, OPTIMIZERS["momentum"](model.parameters())), rows(UNEVEN), step)


def accumulating(sync: bool, num_examples: int) -> Workload:
    """An update every three batches.

    Args:
        sync: whether every backward sends; else the last of three.
        num_examples: as for :func:`optimized`.
    """
    model = net()

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        own, optimizer = objects
        if number % 3 == 0:
            optimizer.zero_grad()
        loss, divisor = cross_entropy(own, batch)
        if sync or number % 3 == 2:
            (loss / 3).backward()
        else:
            with sg.get_strategy().no_sync():
                (loss / 3).backward()
        if number % 3 == 2:
            optimizer.step()
        return loss, divisor

    batch_size = 12 if num_examples == EVEN else 7
    return Workload((model, OPTIMIZERS["adam"](model.parameters())), rows(num_examples), step, batch_size)


accumulated = Training(accumulating, True, EVEN, name="accumulated")
accumulated_uneven = Training(accumulating, True, UNEVEN, name="accumulated_uneven")
no_sync = Training(accumulating, False, EVEN, name="no_sync")
no_sync_uneven = Training(accumulating, False, UNEVEN, name="no_sync_uneven")


@Training
def gan() -> Workload:
    """Two optimizers in one step, one of them twice; the critic also gets gradients of the generator's loss."""
    generator, critic = filled(nn.Linear(2, 4)), filled(nn.Linear(4, 1), seed=4)
    make = torch.optim.Adam(generator.parameters(), 1e-2)
    judge = torch.optim.SGD(critic.parameters(), 5e-2, momentum=0.9)

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        generator, critic, make, judge = objects
        real, noise = batch
        for _ in range(2):
            judge.zero_grad()
            margin = critic(generator(noise).detach()).mean() - critic(real).mean()
            (margin + critic.weight.square().sum()).backward()
            judge.step()
        make.zero_grad()
        loss = -critic(generator(noise)).mean()
        loss.backward()
        make.step()
        return loss, float(len(real))

    data = normal(UNEVEN, 4, seed=6), normal(UNEVEN, 2, seed=7)
    return Workload((generator, critic, make, judge), data, step)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


@Training
def class_weights() -> Workload:
    model = net()

    def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        weights = CLASS_WEIGHTS.to(batch[1].device)
        total = float(weights[batch[1]].sum())
        sg.get_strategy().set_weight(total)
        return functional.cross_entropy(model(batch[0]), batch[1], weight=weights), total

    return Workload((model, OPTIMIZERS["adam"](model.parameters())), rows(UNEVEN), usual(loss_of))


@Training
def ignore_index() -> Workload:
    """In the first batch the last three labels are ignored: one replica of some strategies has nothing but those."""
    model = net()
    inputs, labels = rows(UNEVEN)
    labels = torch.where(torch.tensor([*[False] * 4, *[True] * 3, *[False, True] * 3, False, False]), -100, labels)

    def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        count = float((batch[1] != -100).sum())
        sg.get_strategy().set_weight(count)
        return functional.cross_entropy(model(batch[0]), batch[1]), count

    return Workload((model, OPTIMIZERS["adam"](model.parameters())), (inputs, labels), usual(loss_of))


@Training
def scheduled() -> Workload:
    """One scheduler goes on with every step, another with every epoch."""
    model = net()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    by_epoch = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5)

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        news = usual()(objects, batch, number)
        objects[2].step()
        return news

    objects = model, optimizer, by_step, by_epoch
    return Workload(objects, rows(30), step, batch_size=10, after_epoch=lambda objects: objects[3].step())


def paced(strategy: sg.Strategy) -> dict[str, Any]:
    """Schedulers stepped with every update and with every epoch; every worker takes part in each epoch."""
    one, two = net(), net()
    sgd, momentum = OPTIMIZERS["sgd"](one.parameters()), OPTIMIZERS["momentum"](two.parameters())
    cycle = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=41, cycle_momentum=False)
    halves = torch.optim.lr_scheduler.ExponentialLR(momentum, 0.5)
    pairs = [strategy.prepare(one, sgd), strategy.prepare(two, momentum)]
    by_step, by_epoch = strategy.prepare(cycle, halves)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(*rows(39)), batch_size=2))
    counts = None if strategy.servers is None else strategy.servers.chief
    group = counts.new_group("paced") if counts is not None else ""

    def step(batch: Batch) -> None:
        for model, optimizer in pairs:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        by_step.step()

    own = 0
    for epoch in range(2):
        for number, batch in enumerate(dataset):
            strategy.run(step, args=(batch,))
            own += 1
            if not number and counts is not None:
                counts.agree(group, epoch, 0)  # nobody takes the whole epoch
        by_epoch.step()
    return {"own": own, "places": [by_step.last_epoch, by_epoch.last_epoch], "rates": rates_of([sgd, momentum])}


def _parted(strategy: sg.Strategy, spoil: Callable[[nn.Module, torch.optim.Optimizer], None]) -> list[Any]:
    """Steps until training is refused, when the last replica does something else before its third; and the refusal."""
    net_of_all = net()
    model, optimizer = strategy.prepare(net_of_all, OPTIMIZERS["momentum"](net_of_all.parameters()))
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(*rows(30)), batch_size=6))

    def step(batch: Batch, number: int) -> None:
        context = sg.get_replica_context()
        if context is not None and number == 2 and context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
            spoil(model, optimizer)
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    num_steps = 0
    for batch in dataset:
        text = said(functools.partial(strategy.run, step, (batch, num_steps)))
        if text:
            return [num_steps, text]
        num_steps += 1
    return [num_steps, ""]


def other_rates(strategy: sg.Strategy) -> list[Any]:
    def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    return _parted(strategy, spoil)


@torch.no_grad()
def _add(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).add_(1.0)


def other_weights(strategy: sg.Strategy) -> list[Any]:
    return _parted(strategy, _add)


SCORES = normal(22, 3, seed=21)
"""What is measured: no model changes it, so that workers may go each at its own pace."""
LABELS = integers(3, 22, seed=22)


def metrics() -> list[Any]:
    """Of sums, of everything that was seen, and several in one."""
    several = [torchmetrics.Accuracy("multiclass", num_classes=3), torchmetrics.F1Score("multiclass", num_classes=3)]
    return [
        torchmetrics.MeanMetric(),
        torchmetrics.AUROC("multiclass", num_classes=3, average="none"),
        torchmetrics.MetricCollection(several),
    ]


def measured(strategy: sg.Strategy) -> list[list[Any]]:
    """What prepared metrics compute after each of two epochs; they are reset between them."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model, optimizer, *prepared = strategy.prepare(model, optimizer, *metrics())
    data = TensorDataset(*rows(22), SCORES, LABELS)
    dataset = strategy.distribute_dataset(DataLoader(data, batch_size=7, shuffle=True))

    def step(batch: Batch) -> None:
        inputs, targets, scores, labels = batch
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        prepared[0].update(scores)
        for metric in prepared[1:]:
            metric.update(scores, labels)

    found: list[list[Any]] = []
    for _ in range(2):
        for metric in prepared:
            metric.reset()
        for batch in dataset:
            strategy.run(step, args=(batch,))
        found.append([metric.compute() for metric in prepared])
    return found


@Training
def gradients_sum() -> Workload:
    """Losses divided by the global batch; a penalty on the weights divided by the replicas."""
    model = net()

    def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        loss = sg.compute_average_loss(each, global_batch_size=10)
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        return loss + sg.scale_regularization_loss(0.01 * penalty), 1.0

    objects = model, OPTIMIZERS["adam"](model.parameters())
    return Workload(objects, rows(20), usual(loss_of), batch_size=10, prepare={"gradients": "sum"})


class Bag(nn.Module):
    """A table of rows, of which a batch uses a few."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.head = filled(nn.Linear(4, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.table(tokens).sum(1)))
        return found


SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, 0.01),
}


def sparse_workload(optimizer: str) -> Workload:
    """Outside of a strategy's scope the table is torch's own class in all but name."""
    return sparse_training(Bag(sg.nn.Embedding(30, 4, init=sg.nn.Normal(std=0.5), seed=3)), optimizer)


def sparse_training(model: Bag, optimizer: str) -> Workload:
    lazy, dense = SPARSE[optimizer](model.table.parameters()), torch.optim.SGD(model.head.parameters(), 0.1)

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        own, first, second = objects
        first.zero_grad()
        second.zero_grad()
        loss, divisor = cross_entropy(own, batch)
        loss.backward()
        with torch.sparse.check_sparse_tensor_invariants(False):  # else torch warns, once, that they are off
            first.step()
        second.step()
        return loss, divisor

    return Workload((model, lazy, dense), (integers(30, UNEVEN, 2, seed=8), integers(3, UNEVEN, seed=9)), step)


sparse_sgd = Training(sparse_workload, "SGD", name="sparse_sgd", in_scope=True)
sparse_adagrad = Training(sparse_workload, "Adagrad", name="sparse_adagrad", in_scope=True)
sparse_adam = Training(sparse_workload, "SparseAdam", name="sparse_adam", in_scope=True)


def sparse_refused(strategy: sg.Strategy) -> str:
    """What is said about such a table."""
    model = Bag(nn.Embedding(30, 4, sparse=True))
    return said(lambda: strategy.prepare(*sparse_training(model, "SGD").objects))
