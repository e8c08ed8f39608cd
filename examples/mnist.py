"""Handwritten digits from IDX files with compile, fit, evaluate and save: the walk-through of tf.distribute's guides.

python examples/mnist.py                                  # this process alone
python examples/mnist.py --strategy mirrored --devices cpu:0,cpu:1
stratagem run --workers 2 examples/mnist.py               # two workers in a ring
stratagem run --workers 2 --ps 2 examples/mnist.py        # two workers and two parameter servers

Without the files of MNIST and without a network it learns scikit-learn's digits, which go the same way.
"""

from __future__ import annotations

import argparse
import sys

import torch
from mnist_data import load_mnist, parse_arguments
from torch import nn

import stratagem as sg


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = ("one", "mirrored", "central", "ring", "ps")
    parser.add_argument("--strategy", choices=strategies, help="default: what the environment says")
    parser.add_argument("--devices", help="of this process, one replica each: cuda:0,cuda:1 or (logical) cpu:0,cpu:1")
    parser.add_argument("--batch-size", type=int, default=64, help="for each replica")
    return parser


def decay(epoch: int) -> float:
    """The learning rate of an epoch, counted from 0."""
    return 1e-3 if epoch < 3 else 1e-4 if epoch < 7 else 1e-5


class PrintLR(sg.callbacks.Callback):
    """Says the learning rate of each epoch."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if sg.is_lead():
            print(f"learning rate of epoch {epoch + 1}: {self.model.learning_rate:g}")


def main() -> int:
    arguments = parse_arguments(make_parser(), "mnist")
    torch.manual_seed(0)
    strategy = sg.strategy_from_environment(arguments.strategy, arguments.devices)
    print(f"{strategy.num_replicas_in_sync} replicas in sync")
    mnist = load_mnist(arguments.data_dir, download=not arguments.no_download)
    folder = arguments.model_dir

    with strategy.scope():
        model = sg.Model(
            nn.Sequential(
                nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, 10),
            )
        )  # fmt: skip
        model.compile(optimizer="Adam", loss="cross_entropy", metrics=["accuracy"])

    batch_size = arguments.batch_size * strategy.num_replicas_in_sync
    callbacks = [
        sg.callbacks.TensorBoard(folder / "logs"),
        sg.callbacks.ModelCheckpoint(folder / "checkpoints" / "ckpt_{epoch}", save_weights_only=True),
        sg.callbacks.LearningRateScheduler(decay),
        PrintLR(),
    ]
    model.fit(mnist.train, batch_size=batch_size, epochs=arguments.epochs, callbacks=callbacks)

    last = folder / "checkpoints" / f"ckpt_{arguments.epochs}"  # an earlier run may have left more of them
    model.load_weights(last)
    loss, accuracy = model.evaluate(mnist.test, batch_size=batch_size)
    if sg.is_lead():
        print(f"restored from {last.name}: test loss {loss:.6f}, accuracy {accuracy:.2%}")

    exported = model.save(folder / "export")
    if sg.is_lead():
        outside = sg.Model(sg.load_model(exported))
        outside.compile(loss="cross_entropy", metrics=["accuracy"])
        outside_loss, outside_accuracy = outside.evaluate(mnist.test, batch_size=batch_size, verbose=0)
        print(f"reloaded outside of any scope: test loss {outside_loss:.6f}, accuracy {outside_accuracy:.2%}")
    strategy.barrier()  # on parameter servers save waits for nobody, and the lead alone writes
    with strategy.scope():
        inside = sg.Model(sg.load_model(exported))
        inside.compile(loss="cross_entropy", metrics=["accuracy"])
    inside_loss, inside_accuracy = inside.evaluate(mnist.test, batch_size=batch_size, verbose=0)
    if sg.is_lead():
        print(f"reloaded inside the scope: test loss {inside_loss:.6f}, accuracy {inside_accuracy:.2%}")
    strategy.report(loss=float(loss), reloaded=float(inside_loss), accuracy=float(accuracy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
