"""How global batches become batches of replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

import stratagem as sg
from tests.conformance.scenarios.examples import Numbers, Reader, Steps, Stream, epoch, lists, numbers
from tests.conformance.scenarios.refusals import said


def six_by_four(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(6, 4))


def eight_by_four(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(8, 4))


def four_over_five(strategy: sg.Strategy) -> Steps:
    """On five devices, whatever the strategy has."""
    assert isinstance(strategy, sg.MirroredStrategy | sg.CentralStorageStrategy)
    with contextlib.closing(type(strategy)([f"cpu:{index}" for index in range(5)])) as five:
        return epoch(five, numbers(4, 4))


def one_example(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(1, 1))


def datasets_and_batch_size(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, Numbers(6), batch_size=4)


def lists_of_batches(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, lists(6, 4))


def streams(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, DataLoader(Stream(6), batch_size=4))


class Batches(Dataset[torch.Tensor]):
    """Items that are global batches."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return lists(6, 4)[index]


def items_that_are_batches(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, DataLoader(Batches(), batch_size=None))


def loader_processes(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(6, 4, num_workers=1))


class Records(Dataset[dict[str, Any]]):
    """Dicts with tuples in dicts in them."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.full((3,), float(index)), "more": {"pair": (index, -index)}}


def dicts(strategy: sg.Strategy) -> list[Any]:
    reader = Reader(strategy)
    dataset = strategy.distribute_dataset(DataLoader(Records(), batch_size=4))
    return [[_described(batch) for batch in parts] for parts in reader.items(dataset)]


def _described(batch: Any) -> dict[str, Any]:
    first, second = batch["more"]["pair"]
    return {
        "keys": [*batch, *batch["more"]],
        "examples": first.tolist(),
        "same": batch["row"].tolist() == [[float(number)] * 3 for number in first] and torch.equal(first, -second),
        "row": [str(batch["row"].dtype), list(batch["row"].shape[1:])],
        "first": [str(first.dtype), list(first.shape[1:])],
    }


@dataclasses.dataclass
class Labelled:
    """A batch of a class of the script's own."""

    number: torch.Tensor
    label: torch.Tensor

    @classmethod
    def of(cls, items: list[int]) -> Labelled:
        """A collate_fn."""
        return cls(torch.tensor(items), torch.tensor([[float(-item)] for item in items]))


def dataclasses_of_a_collate_fn(strategy: sg.Strategy) -> list[Any]:
    reader = Reader(strategy)
    dataset = strategy.distribute_dataset(numbers(5, 4, collate_fn=Labelled.of))
    return [
        [[type(b).__name__, b.number.tolist(), b.label.tolist(), list(b.label.shape)] for b in parts]
        for parts in reader.items(dataset)
    ]


def dataclasses_in_a_list(strategy: sg.Strategy) -> list[Any]:
    dataset = strategy.distribute_dataset([Labelled.of([0, 1, 2, 3]), Labelled.of([4])])
    return [
        [[type(b).__name__, b.number.tolist(), b.label.tolist(), list(b.label.shape)] for b in parts]
        for parts in Reader(strategy).items(dataset)
    ]


def skipping_empty(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(25, 12), on_empty="skip")


def steps_left_out(strategy: sg.Strategy) -> dict[str, int]:
    options = sg.DistributeOptions(on_empty="skip")
    source = numbers(25, 12)
    return {
        "call": len(strategy.distribute_dataset(source)),
        "skip": len(strategy.distribute_dataset(source, options=options)),
        "drop_last": len(strategy.distribute_dataset(numbers(25, 12, drop_last=True))),
    }


def length(strategy: sg.Strategy) -> list[int]:
    return [len(strategy.distribute_dataset(numbers(25, 12))), len(strategy.distribute_dataset(numbers(24, 12)))]


def shuffled(strategy: sg.Strategy) -> dict[str, Any]:
    """Two epochs; the order also depends on how many datasets the script has distributed before."""
    reader = Reader(strategy)
    dataset = strategy.distribute_dataset(numbers(14, 4, shuffle=True))
    epochs = [reader.epoch(dataset) for _ in range(dataset.epoch, 2)]
    servers = strategy.servers
    ordinal = vars(strategy)["_num_datasets"] if servers is None else servers.num_datasets
    return {"ordinal": ordinal, "epochs": epochs, "counted": dataset.epoch}


class AnyOrder(Sampler[int]):
    """Another order at every call and in every process."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples

    def __len__(self) -> int:
        return self.num_examples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.seed()
        return iter(torch.randperm(self.num_examples, generator=generator).tolist())


def samplers(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(40, 8, sampler=AnyOrder(40)))


def prefetched(strategy: sg.Strategy) -> dict[str, Any]:
    """How many examples were read when the first step is handed out."""
    news: dict[str, Any] = {}
    for name, ahead in (("default", None), ("two", 2)):
        source = Numbers(5 * 4 * strategy.num_replicas_in_sync)
        loader = DataLoader(source, batch_size=4 * strategy.num_replicas_in_sync)
        dataset = strategy.distribute_dataset(loader, options=sg.DistributeOptions(prefetch=ahead))
        news[name] = []
        steps = []
        for parts in Reader(strategy).items(dataset):
            news[name].append(len(source.asked))
            steps.append([batch.tolist() for batch in parts])
        news[f"{name} steps"] = steps
    return news


def resumed(strategy: sg.Strategy) -> dict[str, Any]:
    """Two shuffled epochs, and again from the middle of the first."""
    reader = Reader(strategy)
    dataset = strategy.distribute_dataset(numbers(18, 4, shuffle=True))
    whole: Steps = []
    state = ""
    for _ in range(2):
        for parts in reader.items(dataset):
            whole.append([batch.tolist() for batch in parts])
            if len(whole) == 2:
                state = json.dumps(dataset.state_dict())
    dataset.load_state_dict(json.loads(state))
    return {"whole": whole, "again": reader.epoch(dataset) + reader.epoch(dataset)}


POSITION = {"epoch": 0, "step": 2, "seed": 0, "policy": "data", "num_examples": 18, "batch_size": 4}


def position(strategy: sg.Strategy) -> dict[str, Any]:
    """What is saved after two steps, and what comes after a position that some strategy saved."""
    reader = Reader(strategy)
    dataset = strategy.distribute_dataset(numbers(18, 4))
    saved: dict[str, Any] = {}
    for number, _ in enumerate(reader.items(dataset)):
        if number == 1:
            saved = dataset.state_dict()
    other = strategy.distribute_dataset(numbers(18, 4))
    other.load_state_dict(POSITION)
    return {"saved": saved, "rest": reader.epoch(other)}


def left_early(strategy: sg.Strategy) -> list[Any]:
    reader = Reader(strategy)
    dataset = strategy.distribute_dataset(numbers(8, 4))
    first = next(iter(reader.items(dataset)))
    return [[batch.tolist() for batch in first], dataset.state_dict()["epoch"], reader.epoch(dataset), dataset.epoch]


def refused(strategy: sg.Strategy) -> dict[str, str]:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(6), num_replicas=2, rank=0)
    return {
        "no batch size": said(lambda: strategy.distribute_dataset(Numbers(6))),
        "two batch sizes": said(lambda: strategy.distribute_dataset(numbers(6, 2), batch_size=3)),
        "already shared out": said(
            lambda: strategy.distribute_dataset(DataLoader(Numbers(6), batch_size=2, sampler=sampler))
        ),
        "no source": said(lambda: strategy.distribute_dataset(7)),  # type: ignore[arg-type]
    }


class Counter(torch.nn.Module):
    """Example i has gradient 1 at row i."""

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(num_examples))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return -self.seen[indices].sum()


def counted(strategy: sg.Strategy) -> list[float]:
    """How often the gradient of each example was applied in two epochs."""
    counter = Counter(30)
    optimizer = torch.optim.SGD(counter.parameters(), 1.0)
    model, prepared = strategy.prepare(counter, optimizer, gradients="sum")
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(torch.arange(30)), batch_size=4, shuffle=True))

    def step(batch: list[torch.Tensor]) -> None:
        prepared.zero_grad()
        model(batch[0]).backward()
        prepared.step()

    for _ in range(2):
        for batch in dataset:
            strategy.run(step, args=(batch,))
    found: list[float] = counter.seen.tolist()
    return found
