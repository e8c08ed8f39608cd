"""Models to export, and a Python that knows torch alone."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import venv
from pathlib import Path

import torch
from packaging.requirements import Requirement
from torch import nn

from stratagem.training.export.export import export_model

OF_TORCH_ALONE = (
    "Failed to initialize NumPy",
    "The given buffer is not writable",  # torch 2.9 reads every program so
)


class Reader(nn.Module):
    """Sums embeddings of words, through what differs between training and evaluation and between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(4, 2)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])  # neither parameter nor buffer

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        found = (self.table(words) * self.scale + places[:, None]).sum(1)
        answer: torch.Tensor = self.out(self.drop(self.norm(found)))
        return answer


def reader() -> Reader:
    """A reader that has been trained a little, so that its running statistics are no round numbers."""
    torch.manual_seed(7)
    model = Reader()
    model(words(16)).sum().backward()
    return model


def words(num_rows: int) -> torch.Tensor:
    return torch.randint(10, (num_rows, 5), generator=torch.Generator().manual_seed(num_rows))


def answer_of(model: nn.Module, num_rows: int) -> torch.Tensor:
    """What ``model`` answers in eval mode; its mode stays."""
    mode = model.training
    with torch.no_grad():
        answer: torch.Tensor = model.eval()(words(num_rows))
    if mode:
        model.train()
    return answer


def exported_reader(folder: Path, model: nn.Module | None = None) -> Path:
    return export_model(reader() if model is None else model, folder, example_inputs=words(2), onnx=False)


def torch_only_python(folder: Path) -> Path:
    """Makes an interpreter that can import torch, what torch requires, and nothing else that is installed here."""
    needed, wanted = {"torch"}, ["torch"]
    packages = folder / "packages"
    packages.mkdir()
    while wanted:
        name = wanted.pop()
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or [] if not file.parts[0].startswith((".", "_"))}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
        for text in distribution.requires or []:
            requirement = Requirement(text)
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if key not in needed and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                needed.add(key)
                wanted.append(key)
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "torch_only.pth").write_text(f"{packages}\n")
    return folder / "venv" / "bin" / "python"


def run_python(python: Path, code: str, *arguments: str | Path) -> str:
    """What ``code`` prints; it must succeed. Runs without this process's environment and path."""
    ignored = [word for message in OF_TORCH_ALONE for word in ("-W", f"ignore:{message}")]
    command = [str(python), "-I", "-W", "error", *ignored, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={}, cwd="/")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
