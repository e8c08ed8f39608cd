"""Sources made of files, which can be assigned to workers file by file."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stratagem.arguments import checked
from stratagem.data.loaders import rebuild_over
from stratagem.errors import ConfigurationError

T = TypeVar("T")
Path = str | os.PathLike[str]


@runtime_checkable
class FileBased(Protocol):
    """A dataset, or an iterable of batches, that AutoShardPolicy.FILE can share out."""

    @property
    def files(self) -> Sequence[Path]:
        """Its files, in one order on every worker."""

    def with_files(self, files: Sequence[Path]) -> Any:
        """The same over some of the files."""


@checked
class FileDataset(IterableDataset[T], Generic[T]):
    """The examples of some files, one file after the other. Implements :class:`FileBased`.

    The worker processes of a DataLoader share the files.

    Args:
        files: their paths, in the same order on every worker (sort the result of a glob).
        read: returns the examples of one file.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[Path], Iterable[T]]) -> None:
        super().__init__()
        self.files: Sequence[Path] = tuple(files)
        self._read = read

    def with_files(self, files: Sequence[Path]) -> FileDataset[T]:
        """The same dataset over some of the files."""
        return FileDataset(files, self._read)

    def __iter__(self) -> Iterator[T]:
        process = get_worker_info()
        mine = self.files if process is None else self.files[process.id :: process.num_workers]
        for file in mine:
            yield from self._read(file)


def file_based(source: Any) -> FileBased | None:
    """What of ``source`` is made of files: itself, or the dataset of a DataLoader; None: nothing."""
    dataset = source.dataset if isinstance(source, DataLoader) else source
    return dataset if isinstance(dataset, FileBased) else None


def own_files(source: Any, num_workers: int, worker: int) -> tuple[Any, str]:
    """``source`` over every ``num_workers``-th file, and what the lists of files of all workers have in common; a
    ConfigurationError where it is not made of files, or has fewer than workers."""
    if (dataset := file_based(source)) is None:
        raise ConfigurationError(
            "AutoShardPolicy.FILE needs a source made of files (sg.FileDataset, or anything with 'files' and "
            f"'with_files(files)'), got {type(source).__name__}; use AutoShardPolicy.DATA"
        )
    files = dataset.files
    if len(files) < num_workers:
        raise ConfigurationError(
            f"AutoShardPolicy.FILE needs a file for each of the {num_workers} workers, got {len(files)}; write more "
            "and smaller files, or use AutoShardPolicy.DATA"
        )
    # Hosts may keep the files in different folders.
    names = "\0".join(os.path.basename(file) for file in files)
    common = f"list of files {zlib.crc32(names.encode()):08x}"
    part = dataset.with_files(files[worker::num_workers])
    return (rebuild_over(source, part) if isinstance(source, DataLoader) else part), common
