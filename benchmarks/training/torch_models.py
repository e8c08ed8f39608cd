"""The workloads in PyTorch: models, one training step, batches from memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import stratagem as sg
from benchmarks.training.workloads import (
    CHANNELS_LAST,
    FEATURE_ROWS,
    FEATURE_WIDTH,
    NUM_CLASSES,
    SEED,
    TABLE_ROWS,
    TABLE_WIDTH,
    TOWERS,
    Workload,
    make_examples,
)
from examples.charlm import GPT, Windows, read_source_text
from stratagem.nn.remote_rows import RemoteRows

Batch = tuple[torch.Tensor, torch.Tensor]

GPT_WIDTH = 128
GPT_LAYERS = 3
TEXT_BYTES = 4_000_000


def make_model(workload: Workload) -> nn.Module:
    """The model of ``workload``, with torch's own initial values."""
    if workload.name in ("cnn", CHANNELS_LAST.name):
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES),
        )  # fmt: skip
    if workload.name == "empty":
        return SumOfWeights(workload.num_parameters)
    if workload.name in TOWERS:
        (width,) = workload.example_shape
        return nn.Sequential(TwoTowers(width, 3), nn.Linear(width, NUM_CLASSES))
    if workload.name == "charlm":
        return GPT(workload.example_shape[0], GPT_WIDTH, GPT_LAYERS)
    if workload.name == "sparse":
        table = sg.nn.EmbeddingBag(TABLE_ROWS, TABLE_WIDTH, mode="sum")
        return nn.Sequential(table, nn.Linear(TABLE_WIDTH, NUM_CLASSES))
    if workload.name == "tables":
        (num_tables,) = workload.example_shape
        return nn.Sequential(Features(num_tables), nn.Linear(num_tables * FEATURE_WIDTH, NUM_CLASSES))
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, NUM_CLASSES),
    )  # fmt: skip


def memory_format(workload: Workload) -> torch.memory_format | None:
    """What ``prepare`` is asked for."""
    return torch.channels_last if workload.name == CHANNELS_LAST.name else None


def in_format(model: nn.Module, workload: Workload) -> nn.Module:
    """A peer's model in the same memory format, as torch itself does it."""
    chosen = memory_format(workload)
    return model if chosen is None else model.to(memory_format=chosen)  # type: ignore[call-overload]


class Features(nn.Module):
    """The rows of an example, one of each table."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(sg.nn.Embedding(FEATURE_ROWS, FEATURE_WIDTH) for _ in range(num_tables))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, column]) for column, table in enumerate(self.tables)], 1)


class TwoTowers(nn.Module):
    """The sum of two stacks of dense layers without biases."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(layer for _ in range(num_layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU()))
            )
            for _ in range(2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` and result are ``(batch, width)``."""
        total: torch.Tensor = self.towers[0](inputs) + self.towers[1](inputs)
        return total


class SumOfWeights(nn.Module):
    """Its output is its loss: nothing is computed but a sum."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_parameters))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        return self.weight.sum()


def own_device(rank: int = 0) -> torch.device:
    """A GPU where this process may see one, which ranks share where there are not enough."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | None = None
) -> Callable[[Batch], float]:
    """One step on one batch, which is brought to ``device`` first; returns its loss."""

    def train_step(batch: Batch) -> float:
        inputs, labels = batch
        if device is not None:
            inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten()) if outputs.dim() else outputs
        loss.backward()
        optimizer.step()
        return loss.item()

    return train_step


def make_tensors(workload: Workload, num_examples: int) -> Batch:
    """Seeded inputs and labels of ``num_examples`` examples."""
    if workload.name == "charlm":
        windows = Windows(read_source_text(TEXT_BYTES), num_examples, workload.example_shape[0], SEED)
        pairs = [windows[index] for index in range(num_examples)]
        return torch.stack([text for text, _ in pairs]), torch.stack([following for _, following in pairs])
    inputs, labels = make_examples(workload, num_examples)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


class MemoryExamples(Dataset[Batch]):
    """``num_steps`` batches of the workload's examples; a whole batch is taken in one indexing operation."""

    NUM_BATCHES_KEPT = 32

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._length = num_steps * workload.batch_size
        self._kept = self.NUM_BATCHES_KEPT * workload.batch_size
        self._inputs, self._labels = make_tensors(workload, self._kept)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._inputs[index % self._kept], self._labels[index % self._kept]

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.tensor(indices) % self._kept
        return self._inputs[rows], self._labels[rows]


def take_as_is(batch: Any) -> Any:
    """Collates nothing: :class:`MemoryExamples` gives whole batches."""
    return batch


def make_loader(workload: Workload, num_steps: int, rank: int = 0, num_ranks: int = 1) -> DataLoader[Batch]:
    """Batches of the workload, drawn without replacement.

    Args:
        workload: what to draw from.
        num_steps: batches, of all ranks together.
        rank: whose part, by torch's own DistributedSampler.
        num_ranks: 1: this process gets all of them.
    """
    examples = MemoryExamples(workload, num_steps)
    sampler: DistributedSampler[Batch] | None = None
    if num_ranks > 1:
        sampler = DistributedSampler(examples, num_ranks, rank, seed=SEED)
    return DataLoader(
        examples,
        batch_size=workload.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        collate_fn=take_as_is,
        pin_memory=torch.cuda.is_available(),
    )


def weights_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or Inf, on parameter servers neither."""
    remote = [module.remote_table for module in model.modules() if isinstance(module, RemoteRows)]
    pieces = (rows for table in remote for _, rows in table.chunks())
    own = (parameter for parameter in model.parameters() if parameter.device.type != "meta")
    return all(bool(torch.isfinite(values).all()) for values in itertools.chain(own, pieces))


def weights_checksum(model: nn.Module) -> int:
    """32 bits over the bits of all weights; equal on replicas that are equal."""
    found = 0
    for parameter in model.parameters():
        found = zlib.crc32(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return found
