"""The Trainer of Hugging Face Transformers over our backend, with a small GPT-2. As with Accelerate, on which it
stands, CPUs get gloo (and ``ddp_backend="stratagem"`` is refused there) unless there is a process group already.

torchrun --nproc-per-node 2 examples/distributed/with_trainer.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import stratagem.distributed  # noqa: F401  # registers the backend

sys.path.append(str(Path(__file__).parents[1]))
from charlm import Windows, read_source_text


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Windows of source text, as a causal language model wants them."""

    def __init__(self, num_windows: int) -> None:
        self.windows = Windows(read_source_text(200_000), num_windows, context=32, seed=0)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text, _ = self.windows[index]
        return {"input_ids": text, "labels": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="stratagem")
    parser.add_argument("--windows", type=int, default=256)
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=16,
            num_train_epochs=2,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=options, train_dataset=Texts(arguments.windows))
        ended = trainer.train()
    if trainer.is_world_process_zero():
        print(f"loss {ended.training_loss:.4f} over {dist.get_backend()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
