"""Files and directories that are on disk when the call returns, or replaced in one piece, and the handling of damaged
ones."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import pathlib
import secrets
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from stratagem.errors import UnreadableError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

READ_AGAIN_S = 10.0
"""For so long a script reads again what a disk does not give."""
_PAUSE_S = 0.1
_Result = TypeVar("_Result")
GIVE_ANOTHER = "give a directory that the chief and every ps can write"
"""What helps otherwise, of the folder of a job's checkpoints."""
_OF_THE_FILE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG),
    None,  # a library's
)
"""Errors of reading that say what lies there, or that nothing does."""


def write_durably(path: pathlib.Path, *pieces: bytes | memoryview) -> tuple[int, str]:
    """Writes a file that does not exist yet. Returns its size in bytes and its SHA-256 in hex. Raises OSError: it
    exists or cannot be written."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that may exist: whoever reads it finds the old text or the new one. Raises OSError: it cannot be
    written; nothing is left of the new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class FileForTorch(io.BufferedWriter):
    """A new file that ``torch.save`` and ``torch.export.save`` write. They end the process at an error of a disk: the
    error is kept until the file is closed.

    Raises:
        OSError: it cannot be opened; from :meth:`close`: it could not be written.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._error: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        """Returns how many bytes ``data`` has."""
        size = memoryview(data).nbytes
        try:
            return size if self._error is not None else super().write(data)
        except OSError as error:
            self._error = error
            return size

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._error = self._error or error

    def close(self) -> None:
        super().close()
        error, self._error = self._error, None
        if error is not None:
            raise error


def append(path: pathlib.Path, content: bytes) -> None:
    """Adds all of it to a file or, where that fails, nothing. Raises OSError: it cannot be written."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            if (written := file.write(content)) < len(content):
                file.write(content[written:])  # says why
        except OSError:
            file.truncate(size)
            raise


def way_out(error: BaseException | None, otherwise: str) -> str:
    """What helps against an error of writing, in words: what lacks, or ``otherwise``, that is another place."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise `ulimit -n`"
    if number == errno.EFBIG:
        return "raise `ulimit -f`, or write where files may be as large"
    return "free some space there" if number in (errno.ENOSPC, errno.EDQUOT) else otherwise


def sync(path: pathlib.Path) -> None:
    """Makes a file, or the entries of a directory, durable. Raises OSError: it cannot be opened."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: pathlib.Path) -> io.BufferedReader:
    """Opens a file to read. A pipe or a device, which may never end or never begin, is none. Raises OSError: it cannot
    be read."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def read_file(path: pathlib.Path) -> bytes:
    """What is in a file, read as :func:`open_file` opens it. Raises OSError: it cannot be read."""
    with open_file(path) as file:
        return file.read()


def hash_file(path: pathlib.Path) -> str:
    """SHA-256 of a file, in hex. Raises OSError: it cannot be read."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_of_disk(error: Exception) -> bool:
    """Whether an error of reading says nothing of what lies there."""
    return isinstance(error, OSError) and error.errno not in _OF_THE_FILE


def check_disk(error: Exception, what: str) -> None:
    """Raises UnreadableError: ``error``, of reading ``what``, is the disk's, and what lies there may be whole."""
    if is_of_disk(error):
        advice = way_out(error, "make it readable, and start again")
        raise UnreadableError(f"{what}: {error}. It may be whole, and stays where it is: {advice}") from None


class Patience:
    """With a disk that does not answer, for so many seconds from now on."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._until = time.monotonic() + for_s
        self._level = logging.WARNING

    def bear(self, error: UnreadableError) -> None:
        """Returns if there is time to try again, which is logged once; raises ``error`` if there is none."""
        if time.monotonic() >= self._until:
            raise error
        logger.log(self._level, "Trying again for up to %.0f s: %s", self._for_s, error)
        self._level = logging.DEBUG


def patiently(read: Callable[[], _Result]) -> _Result:
    """What ``read`` gives; it is called again where the disk does not answer. Raises UnreadableError: for too long."""
    patience = Patience(READ_AGAIN_S)
    while True:
        try:
            return read()
        except UnreadableError as error:
            patience.bear(error)
            time.sleep(_PAUSE_S)


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Gives a damaged checkpoint a name under which nobody looks for one; nothing of it is deleted. Returns that.
    Raises OSError: it cannot be renamed."""
    aside = path.with_name(f".damaged-{path.name}-{secrets.token_hex(4)}")
    path.rename(aside)
    return aside
