"""The data of the MNIST walk-throughs, read from real IDX files that the test writes."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "mnist_data.py"


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, unable to reach any mirror."""
    spec = importlib.util.spec_from_file_location("example_mnist_data", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MIRRORS", ())
    yield module


def images(num_rows: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, 28, 28), np.uint8)


def idx(code: int, shape: tuple[int, ...], elements: bytes) -> bytes:
    """An IDX file by the letter of its description."""
    return bytes([0, 0, code, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape) + elements


def files(num_train: int = 6, num_test: int = 3) -> dict[str, bytes]:
    content = {}
    for stem, num_rows, seed in (("train", num_train, 1), ("t10k", num_test, 2)):
        content[f"{stem}-images-idx3-ubyte"] = idx(8, (num_rows, 28, 28), images(num_rows, seed).tobytes())
        content[f"{stem}-labels-idx1-ubyte"] = idx(8, (num_rows,), bytes(range(num_rows)))
    return content


def write(folder: Path, content: dict[str, bytes], packed: bool) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in content.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_files_are_read_packed_or_not(mnist: ModuleType, tmp_path: Path, packed: bool) -> None:
    write(tmp_path, files(), packed)
    data = mnist.load_mnist(tmp_path)
    assert (len(data.train), len(data.test), data.source) == (6, 3, str(tmp_path))
    pixels, labels = data.train.tensors
    assert pixels.shape == (6, 1, 28, 28) and pixels.dtype == torch.float32
    assert torch.equal((pixels.squeeze(1) * 255).round().to(torch.uint8), torch.from_numpy(images(6, 1)))
    assert labels.dtype == torch.int64 and labels.tolist() == list(range(6))
    assert torch.equal(data.test.tensors[0][2, 0], torch.from_numpy(images(3, 2))[2].float() / 255)


@pytest.mark.parametrize(
    ("code", "elements", "expected"),
    [
        (0x08, b"\xff\x02", [255, 2]),
        (0x09, b"\xff\x02", [-1, 2]),
        (0x0B, b"\xff\xfe\x01\x00", [-2, 256]),
        (0x0C, b"\x00\x01\x00\x00\xff\xff\xff\xff", [65536, -1]),
        (0x0D, b"\x3f\xc0\x00\x00\xc0\x00\x00\x00", [1.5, -2.0]),
        (0x0E, b"\x3f\xf8" + bytes(6) + b"\xc0" + bytes(7), [1.5, -2.0]),
    ],
)
def test_every_type_of_element(mnist: ModuleType, code: int, elements: bytes, expected: list[float]) -> None:
    data = idx(code, (2, 1), elements)
    parsed = mnist.parse_idx(data, "file")
    assert parsed.tolist() == [[value] for value in expected] and parsed.dtype.isnative
    assert mnist.encode_idx(parsed) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no IDX file"),
        (b"\x89PNG\r\n", r"file is no IDX file: expected two zero bytes.*got b'\\x89PNG'"),
        (idx(0x0A, (1,), b"1"), "no IDX file"),
        (bytes([0, 0, 8, 0]), "no IDX file"),
        (idx(8, (2, 2, 2), b"")[:9], "file ends within its header: expected 16 bytes for 3 dimensions"),
        (idx(8, (2, 3), bytes(5)), r"expected 18 bytes for \[2, 3\] elements of uint8, got 17"),
        (idx(0x0B, (2,), bytes(5)), r"expected 12 bytes for \[2\] elements of int16, got 13"),
        (gzip.compress(idx(8, (2,), b"12"), mtime=0)[:-6], "file cannot be unpacked: "),
        (gzip.compress(b"x" * 99, mtime=0)[:12] + b"\xff" * 40, "file cannot be unpacked: "),
    ],
)
def test_what_is_no_idx_file_is_named(mnist: ModuleType, data: bytes, message: str) -> None:
    with pytest.raises(mnist.DataError, match=message):
        mnist.parse_idx(data, "file")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "train-images-idx3-ubyte",
            idx(8, (6, 8, 8), bytes(384)),
            r"training: expected images of 28x28 bytes, got uint8",
        ),
        (
            "train-labels-idx1-ubyte",
            idx(8, (5,), bytes(5)),
            r"training: expected 6 labels of one byte, got uint8 of \[5\]",
        ),
        ("t10k-labels-idx1-ubyte", idx(8, (3,), b"\x01\x02\x0a"), "test: expected labels from 0 to 9, got 10"),
        ("t10k-images-idx3-ubyte", b"<html>", "t10k-images-idx3-ubyte is no IDX file"),
    ],
)
def test_files_that_do_not_fit_are_named(
    mnist: ModuleType, tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    write(tmp_path, files() | {name: data}, packed=False)
    with pytest.raises(mnist.DataError, match=message):
        mnist.load_mnist(tmp_path)


@pytest.mark.parametrize("download", [False, True])
def test_some_files_alone_are_an_error(
    mnist: ModuleType, tmp_path: Path, download: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, dict(list(files().items())[:3]), packed=True)
    monkeypatch.setattr(mnist, "MIRRORS", (f"{(tmp_path / 'nowhere').as_uri()}/",))
    with pytest.raises(mnist.DataError, match=r"; t10k-labels-idx1-ubyte\.gz missing, and (a download|no mirror)"):
        mnist.load_mnist(tmp_path, download)


def serve(mnist: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``folder`` the second of two mirrors, the first of which has nothing."""
    write(folder, files(), packed=True)
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in mnist.SHA256}
    monkeypatch.setattr(mnist, "SHA256", sums)
    monkeypatch.setattr(mnist, "MIRRORS", (f"{folder.as_uri()}/nothing/", f"{folder.as_uri()}/"))


def test_missing_files_are_downloaded_once(mnist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(mnist, tmp_path / "mirror", monkeypatch)
    first = mnist.load_mnist(tmp_path / "new" / "data")
    assert sorted(path.name for path in (tmp_path / "new" / "data").iterdir()) == sorted(mnist.SHA256)
    monkeypatch.setattr(mnist, "MIRRORS", ())
    again = mnist.load_mnist(tmp_path / "new" / "data")
    assert len(first.train) == 6 and torch.equal(first.train.tensors[0], again.train.tensors[0])


def test_a_download_of_something_else_is_refused(
    mnist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(mnist, tmp_path / "mirror", monkeypatch)
    (tmp_path / "mirror" / "t10k-images-idx3-ubyte.gz").write_bytes(b"<html>Log in to this network</html>")
    with pytest.raises(mnist.DataError, match=r"t10k-images-idx3-ubyte\.gz is not the file it should be: expected SHA"):
        mnist.load_mnist(tmp_path / "data")
    assert not (tmp_path / "data" / "t10k-images-idx3-ubyte.gz").exists()


def test_a_folder_that_cannot_be_written_is_named(
    mnist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(mnist, tmp_path / "mirror", monkeypatch)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(mnist.DataError, match=r"cannot be kept in .*file/data: .*Not a directory.*another --data-dir"):
        mnist.load_mnist(tmp_path / "file" / "data")


@pytest.mark.parametrize("download", [False, True])
def test_without_files_and_network_the_digits_take_their_place(
    mnist: ModuleType,
    tmp_path: Path,
    download: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mnist, "MIRRORS", (f"{(tmp_path / 'nowhere').as_uri()}/",))
    data = mnist.load_mnist(tmp_path / "data", download)
    said = capsys.readouterr()
    assert "using scikit-learn's digits" in said.err and said.out == ""
    assert ("no mirror could be reached" if download else "a download was not wanted") in said.err
    assert (len(data.train), len(data.test), data.source) == (1437, 360, "scikit-learn's digits")
    pixels, labels = data.train.tensors
    assert pixels.shape == (1437, 1, 28, 28) and (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))
    border = torch.ones(28, 28, dtype=torch.bool)
    border[4:24, 4:24] = False
    assert not pixels[:, 0, border].any() and pixels[:, 0, 7:21, 7:21].any(0).all()
    assert not (tmp_path / "data").exists()


def test_the_arguments_of_a_script(mnist: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def given(*words: str) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=64)
        monkeypatch.setattr(sys, "argv", ["mnist.py", *words])
        arguments: dict[str, Any] = vars(mnist.parse_arguments(parser, "mnist"))
        return arguments

    defaults = {"batch_size": 64, "epochs": 12, "model_dir": Path("runs/mnist"), "data_dir": None, "no_download": False}
    assert given() == defaults
    assert given("--data-dir", str(tmp_path), "--no-download") == {
        **defaults,
        "data_dir": tmp_path,
        "no_download": True,
    }
    for words in (["--epochs", "0"], ["--epochs", "-1"], ["--batch-size", "0"]):
        with pytest.raises(SystemExit, match="2"):
            given(*words)
