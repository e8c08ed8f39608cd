"""The walk-through of examples/mnist.py as an Estimator: train_and_evaluate in every task of a cluster.

python examples/mnist_estimator.py                                       # this process alone
stratagem run --workers 2 --evaluator examples/mnist_estimator.py        # two workers in a ring, and an evaluator
stratagem run --workers 2 --ps 2 --evaluator examples/mnist_estimator.py # the same on two parameter servers
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from mnist_data import load_mnist, parse_arguments
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128, help="of all replicas together")
    return parser


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def decay(epoch: int) -> float:
    """The learning rate of an epoch, counted from 0."""
    return 1e-3 if epoch < 3 else 1e-4 if epoch < 7 else 1e-5


def model_fn(
    features: torch.Tensor, labels: torch.Tensor, mode: sg.ModeKeys, params: Mapping[str, Any]
) -> sg.EstimatorSpec:
    net = sg.get_or_create("net", make_net)
    logits = net(features)
    if mode == sg.ModeKeys.PREDICT:
        return sg.EstimatorSpec(mode, predictions={"class": logits.argmax(1), "logits": logits})
    loss = nn.functional.cross_entropy(logits, labels)
    if mode == sg.ModeKeys.EVAL:
        return sg.EstimatorSpec(mode, loss=loss, metrics={"accuracy": ("accuracy", logits, labels)})
    optimizer = sg.get_or_create("optimizer", lambda: torch.optim.Adam(net.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = decay(sg.get_global_step() // params["steps_per_epoch"])
    return sg.EstimatorSpec(mode, loss=loss, optimizer=optimizer)


def main() -> int:
    arguments = parse_arguments(make_parser(), "mnist-estimator")
    mnist = load_mnist(arguments.data_dir, download=not arguments.no_download)
    batch_size = arguments.batch_size
    steps_per_epoch = math.ceil(len(mnist.train) / batch_size)
    estimator = sg.Estimator(
        model_fn,
        model_dir=arguments.model_dir,
        config=sg.RunConfig(seed=0, save_checkpoints_steps=steps_per_epoch, save_summary_steps=10),
        params={"steps_per_epoch": steps_per_epoch},
    )
    evaluated = sg.train_and_evaluate(
        estimator,
        sg.TrainSpec(
            lambda: DataLoader(mnist.train, batch_size, shuffle=True),
            max_steps=arguments.epochs * steps_per_epoch,
        ),
        sg.EvalSpec(
            lambda: DataLoader(mnist.test, batch_size),
            steps=None,
            exporters=[sg.BestExporter(), sg.FinalExporter()],
            start_delay_secs=0,
            throttle_secs=1,
        ),
    )
    if evaluated is None:  # a worker of a cluster: its evaluator has the results
        if sg.is_lead():
            print(f"trained {arguments.epochs * steps_per_epoch} steps; the evaluator has the results")
        return 0
    results, export = evaluated.results, evaluated.exports[-1]
    print(f"step {results['global_step']}: test loss {results['loss']:.6f}, accuracy {results['accuracy']:.2%}")
    images, labels = mnist.test.tensors
    with torch.inference_mode():
        loss = float(nn.functional.cross_entropy(sg.load_model(export)(images)["logits"], labels))
    print(f"exported and loaded again: test loss {loss:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
