"""The data of the MNIST walk-throughs: IDX files, downloaded when there is a network, else the digits of scikit-learn.

The files are those of the MNIST database (60,000 and 10,000 images of 28x28), packed with gzip or not. Without them and
without a network, the 1,797 digits of scikit-learn go the same way: scaled to 28x28, encoded as IDX, decoded again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import math
import secrets
import struct
import sys
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
import torch
from torch.utils.data import TensorDataset

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
DEFAULT_DIRECTORY = Path("~/.cache/mnist")
TIMEOUT_S = 20.0
"""For a mirror to answer."""

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_SIZE = 28


class DataError(Exception):
    """Files that are not what they should be; says which and why."""


@dataclasses.dataclass(frozen=True)
class Mnist:
    """Images float32 (N, 1, 28, 28) from 0 to 1, labels int64 (N,) from 0 to 9."""

    train: TensorDataset
    test: TensorDataset
    source: str
    """Where they come from, to print."""


def parse_arguments(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """The arguments of a walk-through: those of ``parser`` and those that all of them take; ``name`` is its folder's.

    A value that trains nothing, or a folder that cannot be made, ends the script with exit code 2.
    """
    folder = Path("runs", name)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--model-dir", type=Path, default=folder, help=f"for all that is written; all tasks see it ({folder})"
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help=f"where the IDX files are, or go to ({DEFAULT_DIRECTORY})"
    )
    parser.add_argument("--no-download", action="store_true", help="without the files take scikit-learn's digits")
    arguments = parser.parse_args()
    for flag in ("epochs", "batch_size"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')}: expected 1 or more, got {getattr(arguments, flag)}")
    try:
        arguments.model_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--model-dir: expected a folder to write in, got {arguments.model_dir} ({error.strerror})")
    return arguments


def load_mnist(data_dir: Path | None = None, download: bool = True) -> Mnist:
    """The training and the test images.

    Args:
        data_dir: with the four files, with or without ".gz"; None: ``~/.cache/mnist``. Files that are missing are
            downloaded into it.
        download: whether they may be. If they may not, or if no mirror can be reached, the digits take their place,
            but only where all four files are missing.

    Raises:
        DataError: a file is damaged or does not fit the others, or some of them are missing.
    """
    folder = (data_dir or DEFAULT_DIRECTORY).expanduser()
    missing = [name for name in SHA256 if _find(folder, name) is None]
    why = "a download was not wanted"
    if missing and download:
        try:
            for name in missing:
                _download(name, folder)
            missing = []
        except ConnectionError as error:
            why = f"no mirror could be reached ({error})"
    if not missing:
        content = {name: _read_file(folder, name) for name in SHA256}
        return _assemble(content, str(folder))
    missing = [name for name in SHA256 if _find(folder, name) is None]
    if len(missing) < len(SHA256):
        raise DataError(f"expected four IDX files in {folder}; {', '.join(missing)} missing, and {why}")
    print(f"No IDX files in {folder}, and {why}: using scikit-learn's digits, scaled to 28x28", file=sys.stderr)
    return _assemble(_digits_as_idx(), "scikit-learn's digits")


def parse_idx(data: bytes, name: str) -> np.ndarray[Any, Any]:
    """The array in the bytes of an IDX file, in the byte order of this machine.

    Args:
        data: unpacked, or packed with gzip.
        name: of the file, for errors.

    Raises:
        DataError: this is no IDX file, or it is shorter or longer than its header says.
    """
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name} cannot be unpacked: {error}; remove it to get it again") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES or not data[3]:
        raise DataError(
            f"{name} is no IDX file: expected two zero bytes, a type and a number of dimensions, got {data[:4]!r}"
        )
    num_dims, dtype = data[3], np.dtype(_DTYPES[data[2]])
    start = 4 + 4 * num_dims
    if len(data) < start:
        raise DataError(f"{name} ends within its header: expected {start} bytes for {num_dims} dimensions")
    shape = struct.unpack(f">{num_dims}I", data[4:start])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise DataError(
            f"{name}: expected {expected} bytes for {list(shape)} elements of {dtype.name}, got {len(data)}"
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def encode_idx(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of an IDX file that holds ``array``."""
    stored = array.astype(array.dtype.newbyteorder(">"))
    codes = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, codes[stored.dtype], array.ndim, *array.shape) + stored.tobytes()


def _find(folder: Path, name: str) -> Path | None:
    packed = folder / name
    return next((path for path in (packed, packed.with_suffix("")) if path.is_file()), None)


def _read_file(folder: Path, name: str) -> np.ndarray[Any, Any]:
    path = _find(folder, name)
    assert path is not None
    return parse_idx(path.read_bytes(), str(path))


def _download(name: str, folder: Path) -> None:
    """Puts a file into ``folder``, whole or not at all; several processes may do so at once.

    Raises:
        ConnectionError: no mirror gave the file.
        DataError: what a mirror gave is not the file, or the folder cannot be written.
    """
    failure = ConnectionError("none is known")
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(mirror + name, timeout=TIMEOUT_S) as answer:
                data: bytes = answer.read()
        except (OSError, http.client.HTTPException) as error:
            failure = ConnectionError(f"{mirror}: {error or type(error).__name__}")
            continue
        found = hashlib.sha256(data).hexdigest()
        if found != SHA256[name]:
            raise DataError(
                f"{mirror}{name} is not the file it should be: expected SHA-256 {SHA256[name]}, got {found}"
            )
        draft = folder / f".{name}.{secrets.token_hex(4)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            draft.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise DataError(f"{name} cannot be kept in {folder}: {error}; give another --data-dir") from None
        return
    raise failure


def _assemble(content: dict[str, np.ndarray[Any, Any]], source: str) -> Mnist:
    train_images, train_labels, test_images, test_labels = content.values()
    train = _dataset(train_images, train_labels, f"{source}, training")
    return Mnist(train, _dataset(test_images, test_labels, f"{source}, test"), source)


def _dataset(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], what: str) -> TensorDataset:
    if images.dtype != np.uint8 or images.shape[1:] != (_SIZE, _SIZE):
        raise DataError(f"{what}: expected images of 28x28 bytes, got {images.dtype} of {list(images.shape)}")
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{what}: expected {len(images)} labels of one byte, got {labels.dtype} of {list(labels.shape)}"
        )
    if labels.size and labels.max() > 9:
        raise DataError(f"{what}: expected labels from 0 to 9, got {labels.max()}")
    return TensorDataset(torch.from_numpy(images).float().unsqueeze(1) / 255, torch.from_numpy(labels).long())


def _digits_as_idx() -> dict[str, np.ndarray[Any, Any]]:
    """The digits in the place of the four files; every fifth one of a fixed order is a test image."""
    digits = sklearn.datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    # As in MNIST: the figure in the middle 20x20 of the image.
    small = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16 * 255
    scaled = torch.nn.functional.interpolate(small, size=(20, 20), mode="bilinear").round()
    images = torch.nn.functional.pad(scaled, (4, 4, 4, 4)).squeeze(1).to(torch.uint8).numpy()
    labels = torch.tensor(digits.target)[order].to(torch.uint8).numpy()
    held_out = np.arange(len(labels)) % 5 == 0
    arrays = (images[~held_out], labels[~held_out], images[held_out], labels[held_out])
    return {name: parse_idx(encode_idx(array), name) for name, array in zip(SHA256, arrays, strict=True)}
