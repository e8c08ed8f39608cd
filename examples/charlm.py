"""A small GPT learns to write Python, byte by byte, from the source of Python's own standard library.

python examples/charlm.py                                 # this process alone
python examples/charlm.py --strategy central --devices cpu:0,cpu:1
stratagem run --workers 2 --ps 2 examples/charlm.py       # a chief, 2 parameter servers, 2 workers
stratagem run --workers 2 examples/charlm.py              # a chief, 2 workers in a ring
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = ("one", "mirrored", "central", "ring", "ps")
    parser.add_argument("--strategy", choices=strategies, help="default: what the environment says")
    parser.add_argument("--devices", help="of this process, one replica each: cuda:0,cuda:1 or (logical) cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=5, help="passes over --windows windows of text")
    parser.add_argument("--windows", type=int, default=4096, help="windows of text in an epoch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-bytes", type=int, default=4_000_000, help="how much source text to read")
    parser.add_argument("--sample-bytes", type=int, default=300, help="how much to write at the end")
    parser.add_argument("--export", metavar="FILE", help="write the trained weights there, as a plain state_dict")
    arguments = parser.parse_args()
    if arguments.epochs < 0 or min(arguments.batch_size, arguments.windows, arguments.context) < 1:
        parser.error("expected --epochs of 0 or more and --batch-size, --windows and --context of 1 or more")
    if arguments.layers < 1 or arguments.sample_bytes < 0:
        parser.error("expected --layers of 1 or more, and --sample-bytes of 0 or more")
    if arguments.width % 4 or arguments.text_bytes <= arguments.context:
        parser.error("expected a --width that 4 heads can share, and --text-bytes above --context")
    return arguments


def read_source_text(num_bytes: int) -> bytes:
    """The first ``num_bytes`` of the standard library's modules, in the order of their names, without its tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.rglob("*.py")):
        if not {"test", "tests", "idle_test", "site-packages"} & set(path.relative_to(library).parts):
            text += path.read_bytes()
            if len(text) >= num_bytes:
                break
    return bytes(text[:num_bytes])


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of ``context`` bytes at seeded places, each with the bytes that follow."""

    def __init__(self, text: bytes, num_windows: int, context: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        places = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - context, (num_windows,), generator=places).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[self.starts[index] : self.starts[index] + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, *heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.feed_forward(self.norm2(x))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, context: int, width: int, num_layers: int, num_heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    @torch.inference_mode()
    def write(self, start: bytes, num_bytes: int, seed: int = 0) -> str:
        """Continues ``start`` by ``num_bytes`` bytes, a little cooler than it learned them."""
        dice = torch.Generator().manual_seed(seed)
        device = self.head.weight.device
        text = torch.tensor([list(start)])
        for _ in range(num_bytes):
            logits = self(text[:, -self.context :].to(device))[:, -1].cpu() / 0.7
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=dice)], 1)
        return bytes(text[0].tolist()).decode(errors="replace")


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    windows = Windows(read_source_text(arguments.text_bytes), arguments.windows, arguments.context, arguments.seed)
    strategy = sg.strategy_from_environment(arguments.strategy, arguments.devices)

    with strategy.scope():
        model = GPT(arguments.context, arguments.width, arguments.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer = strategy.prepare(model, optimizer)
    dataset = strategy.distribute_dataset(DataLoader(windows, batch_size=arguments.batch_size, shuffle=True))

    def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
        text, following = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(dataset.epoch, arguments.epochs):  # a worker that joins a ring begins where the others are
        losses, start = [], time.perf_counter()
        for batch in dataset:
            losses.append(float(strategy.reduce_mean(strategy.run(train_step, args=(batch,)))))
        if losses and sg.is_lead():  # a restarted worker finds no batches in the epochs that it missed
            nats, bits = mean(losses), mean(losses) / math.log(2)
            speed, exposed = len(windows) / (time.perf_counter() - start), strategy.exposed_communication
            print(f"epoch {epoch + 1:2d}  loss {nats:.3f} nats = {bits:.3f} bits a byte", end="  ")
            print(f"{speed:,.0f} windows/s  exposed comm {exposed:.0%}")
            strategy.report(bits_per_byte=bits)

    if sg.is_lead():
        print("--- sample ---", model.write(b"def ", arguments.sample_bytes), sep="\n")
        if arguments.export:
            Path(arguments.export).parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), arguments.export)
    return 0


if __name__ == "__main__":
    sys.exit(main())
