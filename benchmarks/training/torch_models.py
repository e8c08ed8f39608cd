"""The workloads in PyTorch: models, one training step, batches from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.training.workloads import NUM_CLASSES, Workload, make_examples

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(workload: Workload) -> nn.Module:
    """The model of ``workload``, with torch's own initial values."""
    if workload.name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES),
        )  # fmt: skip
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, NUM_CLASSES),
    )  # fmt: skip


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], float]:
    """One step on one batch; returns its loss."""

    def train_step(batch: Batch) -> float:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train_step


class MemoryExamples(Dataset[Batch]):
    """``num_steps`` batches of the workload's examples; a whole batch is taken in one indexing operation."""

    NUM_BATCHES_KEPT = 32

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._length = num_steps * workload.batch_size
        self._kept = self.NUM_BATCHES_KEPT * workload.batch_size
        inputs, labels = make_examples(workload, self._kept)
        self._inputs, self._labels = torch.from_numpy(inputs), torch.from_numpy(labels)

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


def make_loader(workload: Workload, num_steps: int) -> DataLoader[Batch]:
    """``num_steps`` batches of the workload, drawn without replacement."""
    examples = MemoryExamples(workload, num_steps)
    return DataLoader(examples, batch_size=workload.batch_size, shuffle=True, collate_fn=take_as_is)


def weights_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or Inf."""
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
