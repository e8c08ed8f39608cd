"""The examples as a user starts them: one process, small sizes. The cluster runs are in tests/cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import forks

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.usefixtures("preloaded")
TINY_GPT = [
    "--epochs",
    "2",
    "--windows",
    "160",
    "--batch-size",
    "8",
    "--context",
    "16",
    "--width",
    "16",
    "--layers",
    "1",
]


def run_example(name: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return forks.run(command, timeout=100, env=environment, cwd=cwd)


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_names_the_optimizers_that_can_train_it() -> None:
    ended = run_example("digits.py", "--optimizer", "adam")
    assert ended.returncode == 2, ended.stderr
    named = re.findall(r"[A-Z]\w+", ended.stderr.partition("choose from")[2])
    assert {"SGD", "Adam", "AdamW"} <= set(named)
    model = load_example("digits").make_model()
    for name in named:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
        model(torch.zeros(2, 1, 8, 8)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("digits.py", ["--epochs", "-1"], "--epochs of 0 or more"),
        ("digits.py", ["--batch-size", "0"], "--batch-size of 1 or more"),
        ("charlm.py", ["--epochs", "-1"], "--epochs of 0 or more"),
        ("charlm.py", ["--context", "0"], "--context of 1 or more"),
        ("charlm.py", ["--layers", "-1"], "--layers of 1 or more"),
        ("charlm.py", ["--sample-bytes", "-5"], "--sample-bytes of 0 or more"),
        ("mnist.py", ["--no-download", "--model-dir", f"{__file__}/x"], "--model-dir: expected a folder"),
        ("charlm.py", ["--width", "10"], "--width that 4 heads can share"),
        ("charlm.py", ["--text-bytes", "10"], "--text-bytes above --context"),
    ],
)
def test_what_cannot_train_is_refused(name: str, words: list[str], expected: str) -> None:
    ended = run_example(name, *words)
    assert ended.returncode == 2 and expected in ended.stderr, ended.stderr


@pytest.mark.thorough
def test_a_walk_through_restores_what_it_trained(tmp_path: Path) -> None:
    for num_epochs in (2, 1):
        arguments = ["--no-download", "--batch-size", "1437", "--epochs", str(num_epochs)]
        ended = run_example("mnist.py", *arguments, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert f"restored from ckpt_{num_epochs}: " in ended.stdout
    assert (tmp_path / "runs" / "mnist" / "checkpoints" / "ckpt_2").is_dir()


def test_digits_learns_and_exports_plain_weights(tmp_path: Path) -> None:
    export = tmp_path / "new" / "digits.pt"
    ended = run_example(
        "digits.py", "--strategy", "one", "--epochs", "6", "--export", str(export), "--min-accuracy", "0.9"
    )
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"epoch +\d+  loss \d\.\d{4}  [\d,]+ examples/s  exposed comm 0%", ended.stdout)) == 6
    accuracy = re.search(r"held-out accuracy ([\d.]+)% on 360 digits", ended.stdout)
    assert accuracy is not None and float(accuracy[1]) >= 90
    digits = load_example("digits")
    model = digits.make_model()
    model.load_state_dict(torch.load(export, weights_only=True))
    assert f"{digits.evaluate(model, digits.load_digits()[1]):.2%}" == f"{float(accuracy[1]):.2f}%"


def test_digits_fails_below_the_accuracy_that_was_asked_for() -> None:
    ended = run_example("digits.py", "--strategy", "one", "--epochs", "0", "--min-accuracy", "0.97")
    assert ended.returncode == 1
    assert "held-out accuracy" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_the_split_of_the_digits_is_fixed_and_disjoint() -> None:
    digits = load_example("digits")
    train, test = digits.load_digits()
    assert (len(train), len(test)) == (1437, 360)
    assert torch.equal(digits.load_digits()[1].tensors[0], test.tensors[0])
    assert train.tensors[0].shape[1:] == (1, 8, 8)
    assert (float(train.tensors[0].min()), float(train.tensors[0].max())) == (0.0, 1.0)


def test_charlm_learns_and_writes() -> None:
    ended = run_example("charlm.py", "--strategy", "one", *TINY_GPT, "--text-bytes", "20000", "--sample-bytes", "20")
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"epoch +\d+  loss ([\d.]+) nats", ended.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "--- sample ---\ndef " in ended.stdout


def test_the_text_is_the_standard_library_without_its_tests() -> None:
    charlm = load_example("charlm")
    text = charlm.read_source_text(50_000)
    assert len(text) == 50_000
    assert text == charlm.read_source_text(50_000)
    assert b"def " in text and b"class " in text


def test_a_window_is_followed_by_its_own_next_bytes() -> None:
    charlm = load_example("charlm")
    windows = charlm.Windows(bytes(range(100)), 30, 8, seed=1)
    assert len(windows) == 30
    for text, following in (windows[index] for index in range(30)):
        assert text.tolist() == list(range(int(text[0]), int(text[0]) + 8))
        assert torch.equal(text + 1, following)
    assert charlm.Windows(bytes(range(100)), 30, 8, seed=1).starts == windows.starts


@pytest.mark.parametrize("changed", [0, 3, 5])
def test_the_gpt_does_not_see_the_future(changed: int) -> None:
    charlm = load_example("charlm")
    torch.manual_seed(0)
    model = charlm.GPT(context=6, width=16, num_layers=2)
    text = torch.randint(256, (1, 6))
    other = text.clone()
    other[0, changed] = (other[0, changed] + 1) % 256
    same = torch.isclose(model(text), model(other), atol=1e-6).all(-1)[0]
    assert same[:changed].all()
    assert not same[changed:].any()


def test_writing_is_repeatable_and_longer_than_the_context() -> None:
    charlm = load_example("charlm")
    torch.manual_seed(0)
    model = charlm.GPT(context=6, width=16, num_layers=1)
    assert model.write(b"def ", 12) == model.write(b"def ", 12)
    assert len(model.write(b"def ", 12).encode(errors="replace")) >= 16
