"""Lightning over our backend.

torchrun --nproc-per-node 2 examples/distributed/with_lightning.py
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem.distributed  # noqa: F401  # registers the backend


class Digits(lightning.LightningModule):
    """Two layers that tell digits apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="stratagem")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend=arguments.backend),
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(digits, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f} over {dist.get_backend()}", flush=True)


if __name__ == "__main__":
    main()
