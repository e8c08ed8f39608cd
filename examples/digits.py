"""Learns the handwritten digits that scikit-learn carries (UCI, 1,797 images of 8x8): a small CNN, plain PyTorch.

python examples/digits.py                                 # this process alone
python examples/digits.py --strategy mirrored --devices cpu:0,cpu:1
stratagem run --workers 2 --ps 2 examples/digits.py       # a chief, 2 parameter servers, 2 workers
stratagem run --workers 2 examples/digits.py              # a chief, 2 workers in a ring
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import mean

import sklearn.datasets
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = ("one", "mirrored", "central", "ring", "ps")
    parser.add_argument("--strategy", choices=strategies, help="default: what the environment says")
    parser.add_argument("--devices", help="of this process, one replica each: cuda:0,cuda:1 or (logical) cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    others = ("Optimizer", "LBFGS", "Muon", "SparseAdam")  # these want a closure, matrices alone, sparse gradients
    optimizers = [name for name in torch.optim.__all__ if name[0].isupper() and name not in others]
    parser.add_argument("--optimizer", choices=optimizers, default="Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", metavar="FILE", help="write the trained weights there, as a plain state_dict")
    parser.add_argument("--logs", metavar="DIR", help="write curves for TensorBoard there")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this held-out accuracy")
    arguments = parser.parse_args()
    if arguments.epochs < 0 or arguments.batch_size < 1:
        parser.error("expected --epochs of 0 or more and --batch-size of 1 or more")
    return arguments


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """The training images and, every fifth one of a fixed order, the held-out images."""
    digits = sklearn.datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[order]
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    train_data, test_data = load_digits()
    if sg.is_evaluator():
        return evaluate_checkpoints(test_data)
    strategy = sg.strategy_from_environment(arguments.strategy, arguments.devices)

    with strategy.scope():
        model = make_model()
        optimizer = getattr(torch.optim, arguments.optimizer)(model.parameters(), lr=arguments.lr)
    model, optimizer = strategy.prepare(model, optimizer)
    loader = DataLoader(train_data, batch_size=arguments.batch_size, shuffle=True)
    dataset = strategy.distribute_dataset(loader)

    def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(dataset.epoch, arguments.epochs):  # a worker that joins a ring begins where the others are
        for group in optimizer.param_groups:  # cosine decay, right also for a worker that starts again in mid-job
            group["lr"] = arguments.lr * (1 + math.cos(math.pi * epoch / arguments.epochs)) / 2
        losses, start = [], time.perf_counter()
        for batch in dataset:
            losses.append(float(strategy.reduce_mean(strategy.run(train_step, args=(batch,)))))
        if losses and sg.is_lead():  # a restarted worker finds no batches in the epochs that it missed
            speed = len(train_data) / (time.perf_counter() - start)
            exposed = strategy.exposed_communication
            draw(arguments.logs, epoch + 1, loss=mean(losses), examples_per_s=speed)
            print(f"epoch {epoch + 1:2d}  loss {mean(losses):.4f}  {speed:,.0f} examples/s  exposed comm {exposed:.0%}")

    accuracy = evaluate(model, test_data)
    strategy.report(accuracy=accuracy)
    if sg.is_lead():
        print(f"held-out accuracy {accuracy:.2%} on {len(test_data)} digits")
        if arguments.export:
            Path(arguments.export).parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), arguments.export)
    return 0 if accuracy >= arguments.min_accuracy else 1


def draw(logs: str | None, epoch: int, **values: float) -> None:
    """A point of each curve."""
    if logs:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(logs) as writer:
            for name, value in values.items():
                writer.add_scalar(name, value, epoch)


def evaluate_checkpoints(test_data: TensorDataset) -> int:
    """What the evaluator does beside the training cluster."""
    model = make_model()
    for checkpoint in sg.new_checkpoints():
        model.load_state_dict(checkpoint.state_dict)
        print(f"step {checkpoint.step}: held-out accuracy {evaluate(model, test_data):.2%}")
    return 0


@torch.inference_mode()
def evaluate(model: nn.Module, data: TensorDataset) -> float:
    """Part of ``data`` that ``model`` names correctly."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in data.tensors)
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    sys.exit(main())
