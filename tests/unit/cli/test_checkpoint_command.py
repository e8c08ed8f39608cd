"""`stratagem checkpoint inspect | consolidate | verify`."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from stratagem.cli import __main__ as cli
from stratagem.cli.checkpoint import _write
from stratagem.cluster import exit_codes
from tests.file_sizes import file_size_limit
from tests.unit.training.checkpoint_objects import Script, same


@pytest.fixture
def script() -> Script:
    script = Script()
    script.train(2)
    return script


def stratagem(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command's exit code."""
    monkeypatch.setattr(sys, "argv", ["stratagem", "checkpoint", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_inspect(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script.checkpoint.save(tmp_path / "step", step=7)
    assert stratagem(monkeypatch, "inspect", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["step"]) == (path, 7)
    assert found["objects"]["optimizer"] == "optimizer" and found["objects"]["epoch"] == "value"
    weight = next(entry for entry in found["tensors"] if entry["name"] == "0.weight")
    assert weight == {"name": "0.weight", "dtype": "float32", "shape": [3, 4], "file": "model.safetensors"}
    assert sum(file["bytes"] for file in found["files"]) == found["bytes"]
    assert stratagem(monkeypatch, "inspect", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step      7" in lines and any(line.split()[:3] == ["0.weight", "float32", "[3,"] for line in lines)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_consolidate(
    tmp_path: Path,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # as exFAT does
    path, out = script.checkpoint.save(tmp_path / "step"), tmp_path / f"plain{suffix}"
    assert stratagem(monkeypatch, "consolidate", path, out) == 0
    assert f"{out}: {len(script.state())} entries" in capsys.readouterr().out
    state = safetensors.torch.load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    assert same(state, script.state())
    assert stratagem(monkeypatch, "consolidate", path, out) == exit_codes.EXIT_USAGE
    assert "exists already" in capsys.readouterr().err
    assert stratagem(monkeypatch, "consolidate", path, tmp_path / "x.bin") == exit_codes.EXIT_USAGE
    assert stratagem(monkeypatch, "consolidate", path, tmp_path / "none" / f"x{suffix}") == exit_codes.EXIT_FAILED
    assert "x" + suffix + ": No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_state_that_does_not_fit_is_an_error_of_the_file(tmp_path: Path, suffix: str) -> None:
    """Where torch writes, an error in the middle would end the process."""
    with file_size_limit(100_000), pytest.raises(OSError, match="File too large"):
        _write(tmp_path / f"large{suffix}", {"weight": torch.zeros(100_000)})


def test_consolidate_another_object(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = script.checkpoint.save(tmp_path / "step"), tmp_path / "optimizer"
    assert stratagem(monkeypatch, "consolidate", path, f"{out}.pt", "--object", "optimizer") == 0
    assert torch.load(f"{out}.pt", weights_only=True).keys() == {"state", "param_groups"}
    refused = stratagem(monkeypatch, "consolidate", path, f"{out}.safetensors", "--object", "optimizer")
    assert refused == exit_codes.EXIT_USAGE and not Path(f"{out}.safetensors").exists()


def test_verify(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = script.checkpoint.save(tmp_path / "step"), script.checkpoint.save(tmp_path / "step")
    assert stratagem(monkeypatch, "verify", bad) == 0
    assert capsys.readouterr().out == f"{bad}: every file is as it was written\n"
    with (Path(bad) / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert stratagem(monkeypatch, "verify", bad) == 1
    out = capsys.readouterr().out
    assert f"damaged: {bad}/optimizer.safetensors was altered" in out and f"The last good checkpoint is {good}" in out
    assert stratagem(monkeypatch, "verify", good) == 0
    (Path(bad) / "optimizer.safetensors").unlink()
    capsys.readouterr()
    assert stratagem(monkeypatch, "verify", tmp_path) == 1  # a directory whose newest one is passed over
    out = capsys.readouterr().out
    assert f"damaged: {bad}/optimizer.safetensors is missing" in out and f"The last good checkpoint is {good}" in out
    (tmp_path / "empty").mkdir()
    assert stratagem(monkeypatch, "verify", tmp_path / "empty") == exit_codes.EXIT_FAILED
    assert "is not a complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_what_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    path = Path(script.checkpoint.save(tmp_path / "step"))
    opened = os.open

    def refuse(what: object, *arguments: Any, **options: Any) -> int:
        if what == path / "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(what))
        return opened(what, *arguments, **options)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(os, "open", refuse)
    assert stratagem(monkeypatch, command, tmp_path) == exit_codes.EXIT_FAILED
    said = capsys.readouterr()
    assert f"{path}/model.safetensors cannot be read" in said.err and "It may be whole" in said.err
    assert not said.out
