"""The workloads: sizes that the page promises, data that is the same everywhere and can be learned."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import apply_rows
from benchmarks.apply import WrongUpdateError
from benchmarks.training.torch_models import (
    MemoryExamples,
    make_loader,
    make_model,
    make_step,
    weights_checksum,
    weights_finite,
)
from benchmarks.training.workloads import CLASSIFIERS, WORKLOADS, make_examples
from stratagem.ps.table_group import TableGroup


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_model_has_the_parameters_that_are_said(name: str) -> None:
    with torch.device("meta"):
        model = make_model(WORKLOADS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == WORKLOADS[name].num_parameters


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_examples_are_seeded(name: str) -> None:
    workload = WORKLOADS[name]
    inputs, labels = make_examples(workload, 20)
    again, same_labels = make_examples(workload, 20)
    assert inputs.shape == (20, *workload.example_shape)
    assert inputs.dtype == np.float32
    assert set(labels) <= set(range(10))
    assert np.array_equal(inputs, again)
    assert np.array_equal(labels, same_labels)


def test_a_loader_gives_whole_batches_of_the_right_rows() -> None:
    workload = WORKLOADS["cnn"]
    examples = MemoryExamples(workload, 40)
    assert len(examples) == 40 * 64
    inputs, labels = examples.__getitems__([0, 2049])
    assert torch.equal(inputs[1], examples[2049][0]) and labels[1] == examples[2049][1]
    batches = list(make_loader(workload, 3))
    assert [tuple(batch[0].shape) for batch in batches] == [(64, 1, 28, 28)] * 3


def test_text_is_windows_with_what_follows() -> None:
    examples = MemoryExamples(WORKLOADS["charlm"], 1)
    inputs, labels = examples.__getitems__([0, 5])
    assert inputs.shape == labels.shape == (2, 64)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert int(inputs.max()) < 256


def test_ranks_share_the_batches() -> None:
    workload = dataclasses.replace(WORKLOADS["cnn"], batch_size=2)
    whole = sorted(int(label) for _, labels in make_loader(workload, 6) for label in labels)
    loaders = [make_loader(workload, 6, rank, 2) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert sorted(int(label) for loader in loaders for _, labels in loader for label in labels) == whole


def test_the_joined_work_is_the_same_work() -> None:
    workload = WORKLOADS["dense"]
    joined = workload.of_all(4)
    assert (joined.batch_size, joined.warmup_steps, joined.timed_steps) == (128, 2, 16)
    with pytest.raises(ValueError, match="divides 8 and 64 steps, got 3"):
        workload.of_all(3)


def test_equal_weights_have_equal_checksums() -> None:
    model = make_model(WORKLOADS["cnn"])
    before = weights_checksum(model)
    assert weights_checksum(copy.deepcopy(model)) == before
    parameter = next(model.parameters())
    parameter.data.view(-1)[-1] = torch.nextafter(parameter.data.view(-1)[-1], torch.tensor(1.0))
    assert weights_checksum(model) != before


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cnn", "charlm"])
def test_the_loss_falls(name: str) -> None:
    torch.manual_seed(0)
    workload = dataclasses.replace(
        WORKLOADS[name], batch_size=WORKLOADS[name].batch_size // (8 if name == "charlm" else 1)
    )
    model = make_model(workload)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    losses = [step(batch) for batch in make_loader(workload, 12)]
    assert losses[-1] < (0.9 if name == "charlm" else 0.8) * losses[0]
    assert weights_finite(model)
    next(model.parameters()).data[0] = float("nan")
    assert not weights_finite(model)


@pytest.mark.parametrize("optimizer", apply_rows.HYPER_PARAMETERS)
def test_rows_are_updated_as_torch_does(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = apply_rows.time_updates(optimizer, num_rows=3000, num_updates=3)
    assert set(sample) == {"rows_per_s", "rows_per_cpu_s"}
    monkeypatch.setattr(TableGroup, "apply", lambda *arguments: None)
    with pytest.raises(WrongUpdateError):
        apply_rows.time_updates(optimizer, num_rows=3000, num_updates=3)
