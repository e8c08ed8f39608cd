"""The walk-through of examples/mnist.py with a training loop of one's own: plain steps, a scheduler, checkpoints.

python examples/mnist_loop.py                             # this process alone
python examples/mnist_loop.py --strategy central --devices cpu:0,cpu:1
stratagem run --workers 2 examples/mnist_loop.py          # two workers in a ring
stratagem run --workers 2 --ps 2 examples/mnist_loop.py   # two workers and two parameter servers
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean

import torch
from mnist_data import load_mnist, parse_arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = ("one", "mirrored", "central", "ring", "ps")
    parser.add_argument("--strategy", choices=strategies, help="default: what the environment says")
    parser.add_argument("--devices", help="of this process, one replica each: cuda:0,cuda:1 or (logical) cpu:0,cpu:1")
    parser.add_argument("--batch-size", type=int, default=64, help="for each replica")
    return parser


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(5408, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> int:
    arguments = parse_arguments(make_parser(), "mnist-loop")
    torch.manual_seed(0)
    strategy = sg.strategy_from_environment(arguments.strategy, arguments.devices)
    mnist = load_mnist(arguments.data_dir, download=not arguments.no_download)
    folder = arguments.model_dir

    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7], gamma=0.1)
    model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
    batch_size = arguments.batch_size * strategy.num_replicas_in_sync
    dataset = strategy.distribute_dataset(DataLoader(mnist.train, batch_size=batch_size, shuffle=True))
    checkpoint = sg.Checkpoint(strategy=strategy, model=model, optimizer=optimizer, scheduler=scheduler, epoch=0)
    manager = sg.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=3)
    found = manager.restore_or_initialize()
    if found and sg.is_lead():
        print(f"going on after epoch {checkpoint.epoch}, from {found}")

    def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(checkpoint.epoch + 1, arguments.epochs + 1):
        losses = [float(strategy.reduce_mean(strategy.run(train_step, args=(batch,)))) for batch in dataset]
        rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        checkpoint.epoch = epoch
        manager.save(epoch)
        if losses and sg.is_lead():
            print(f"epoch {epoch:2d}  learning rate {rate:g}  loss {mean(losses):.4f}")

    trained, accuracy = evaluate(model, mnist.test)
    fresh = make_model()
    newest = sg.latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    fresh.load_state_dict(sg.load_checkpoint(newest))
    restored, _ = evaluate(fresh, mnist.test)
    if sg.is_lead():
        print(f"test loss {trained:.6f}, accuracy {accuracy:.2%}")
        print(f"{Path(newest).name} without a strategy: test loss {restored:.6f}")
        exported = sg.export_model(model, folder / "export", torch.zeros(2, 1, 28, 28))
        reloaded, _ = evaluate(sg.load_model(exported), mnist.test)
        print(f"exported and loaded again: test loss {reloaded:.6f}")
    return 0


@torch.inference_mode()
def evaluate(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Mean loss, and the part of ``data`` that ``model`` names correctly."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in data.tensors)
    logits = model(images)
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


if __name__ == "__main__":
    sys.exit(main())
