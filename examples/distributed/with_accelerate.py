"""Hugging Face Accelerate over our backend. On CPUs it takes gloo whatever it is told, but a process group that exists
already is the one it uses.

torchrun --nproc-per-node 2 examples/distributed/with_accelerate.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem.distributed  # noqa: F401  # registers the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="stratagem")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, batch_size=32, shuffle=True))
    for _ in range(arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"loss {mean:.4f} over {dist.get_backend()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
