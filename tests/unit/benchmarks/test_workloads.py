"""The workloads: sizes that the page promises, data that is the same everywhere and can be learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.training.torch_models import MemoryExamples, make_loader, make_model, make_step, weights_finite
from benchmarks.training.workloads import WORKLOADS, make_examples


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_model_has_the_parameters_that_are_said(name: str) -> None:
    with torch.device("meta"):
        model = make_model(WORKLOADS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == WORKLOADS[name].num_parameters


@pytest.mark.parametrize("name", WORKLOADS)
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


def test_the_loss_falls() -> None:
    torch.manual_seed(0)
    workload = WORKLOADS["cnn"]
    model = make_model(workload)
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    losses = [step(batch) for batch in make_loader(workload, 12)]
    assert losses[-1] < 0.8 * losses[0]
    assert weights_finite(model)
    next(model.parameters()).data[0] = float("nan")
    assert not weights_finite(model)
