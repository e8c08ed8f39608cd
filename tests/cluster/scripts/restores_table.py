"""Restores a table of parameter servers, and says how much memory that took beyond what the worker had."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

WIDTH = 64


def peak_bytes() -> int:
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) * 1024


def say(folder: Path, strategy: sg.ParameterServerStrategy, grown: int) -> None:
    (folder / f"{strategy.task}.json").write_text(json.dumps({"grown": grown, "is_lead": strategy.is_lead}))


def main() -> None:
    folder, num_rows = Path(sys.argv[1]), int(sys.argv[2])
    strategy = sg.ParameterServerStrategy()
    path = folder / "table-00000001"
    if path.exists():
        with strategy.scope():
            untrained = sg.Model(sg.nn.Embedding(num_rows, WIDTH))
        before = peak_bytes()
        untrained.load_weights(path)
        untrained.compile(lambda parameters: torch.optim.SGD(parameters, 0.5), torch.nn.functional.mse_loss)
        say(folder, strategy, peak_bytes() - before)
        some = torch.arange(0, num_rows, num_rows // 16)
        assert torch.equal(untrained.module(some).detach(), sg.load_checkpoint(path)["weight"][some])
        return
    with strategy.scope():
        model = sg.nn.Embedding(num_rows, WIDTH)
        model, optimizer = strategy.prepare(model, torch.optim.Adagrad(model.parameters(), 0.5))
        checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
    ids = torch.arange(0, num_rows, num_rows // 16)[:16]
    batches = strategy.distribute_dataset(DataLoader(TensorDataset(ids), batch_size=4))

    def train() -> torch.Tensor:
        for batch in batches:
            optimizer.zero_grad()
            model(batch[0]).sum().backward()
            optimizer.step()
        strategy.barrier()
        rows: torch.Tensor = model(ids).detach()
        return rows

    train()
    checkpoint.save(folder / "table", step=1)
    strategy.barrier()
    expected = train()
    before = peak_bytes()
    checkpoint.restore(path)
    grown = peak_bytes() - before
    torch.testing.assert_close(train(), expected)  # the sums of Adagrad too
    say(folder, strategy, grown)


if __name__ == "__main__":
    main()
