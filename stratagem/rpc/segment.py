"""Memory shared by processes of one host: anonymous, passed as a descriptor, freed with its last user.

A segment is a memfd. It has no name, so nothing is left in ``/dev/shm`` and a container's limit on that folder does not
count; the kernel frees it when the last process that maps it ends, however it ends. Its pages are allocated when it is
made, not when they are first written: a process that gets a segment can use all of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from stratagem.errors import SegmentError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NOT_WRITABLE = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE; torch leaks a descriptor where a mapping fails
_DESCRIPTOR = struct.Struct("=i")
_ROOM = socket.CMSG_LEN(_DESCRIPTOR.size)
_CLOSED_BY_EXEC = int(socket.MSG_CMSG_CLOEXEC)  # to join members of the enum costs a microsecond a message
_PAGE_BYTES = 4096
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Segment:
    """One piece of shared memory, mapped here as ``tensor``, flat uint8. The mapping lives as long as this tensor or
    any view of it: a segment whose views are still held after :meth:`close` is unmapped with the last of them."""

    def __init__(self, tensor: torch.Tensor, descriptor: int | None) -> None:
        self.tensor = tensor
        self._descriptor = descriptor

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """New memory, at least 1 byte, all zero, every page present; :meth:`send_to` works until :meth:`stop_sharing`.
        SegmentError: there is not that much memory, a limit forbids it, or the system has no memfd."""
        if num_bytes < 1:
            raise SegmentError(f"expected a segment of at least 1 byte, got {num_bytes:,}", errno.EINVAL)
        free = free_bytes()
        if free is not None and num_bytes > free:
            text = f"only {free:,} are free (memory of the machine, or the limit of this container)"
            raise _refused(num_bytes, text, errno.ENOMEM)
        if not hasattr(os, "memfd_create"):
            raise _refused(num_bytes, "this system has no memfd_create", errno.ENOSYS)
        try:
            descriptor = os.memfd_create("stratagem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _refused(num_bytes, f"memfd_create: {error.strerror}", error.errno) from error
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(_map(descriptor, num_bytes), descriptor)
        except OSError as error:
            os.close(descriptor)
            limit = " (RLIMIT_FSIZE, `ulimit -f`, counts here)" if error.errno == errno.EFBIG else ""
            raise _refused(num_bytes, f"{error.strerror}{limit}", error.errno) from error
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, num_bytes: int) -> Segment:
        """Maps what a peer made. Takes the descriptor over and closes it.

        A peer that shrank the memory later would end this process with SIGBUS: only memory that is sealed against it is
        mapped. SegmentError: it is not a sealed memfd of exactly ``num_bytes``, or cannot be mapped.
        """
        try:
            size = os.fstat(descriptor).st_size
            if size != num_bytes:
                raise SegmentError(f"expected a shared segment of {num_bytes:,} bytes, got {size:,}", errno.EINVAL)
            try:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError as error:
                raise SegmentError(
                    "expected a memfd as shared segment, got another kind of file", errno.EINVAL
                ) from error
            if seals & (fcntl.F_SEAL_SHRINK | _NOT_WRITABLE) != fcntl.F_SEAL_SHRINK:
                raise SegmentError(
                    "expected a shared segment that is sealed against shrinking, and not against writing", errno.EINVAL
                )
            return cls(_map(descriptor, num_bytes), None)
        except OSError as error:
            raise _refused(num_bytes, error.strerror or str(error), error.errno or 0) from error
        finally:
            os.close(descriptor)

    def send_to(self, link: socket.socket, message: bytes, flags: int = 0) -> None:
        """Sends ``message`` and the right to map this segment over an AF_UNIX socket."""
        if self._descriptor is None:
            raise ValueError("the segment is not shared any more")
        right = socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(self._descriptor)
        link.sendmsg([message], [right], flags)  # socket.send_fds drops its flags

    def stop_sharing(self) -> None:
        """Closes the descriptor: everybody who needs the segment has it. The mapping stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        self.stop_sharing()
        self.tensor = torch.empty(0, dtype=torch.uint8)


def receive_descriptor(link: socket.socket, num_message_bytes: int) -> tuple[bytes, int | None]:
    """Takes what :meth:`Segment.send_to` sent: the message, and the descriptor if one came with it."""
    message = bytearray(num_message_bytes)
    count, descriptor = receive_descriptor_into(link, memoryview(message))
    return bytes(message[:count]), descriptor


def receive_descriptor_into(link: socket.socket, view: memoryview, flags: int = 0) -> tuple[int, int | None]:
    """Reads bytes, and a descriptor if one came with them; how many bytes."""
    # Not socket.recv_fds: it drops its flags, and a child that this process starts would inherit the descriptor.
    count, ancillary, _, _ = link.recvmsg_into([view], _ROOM, _CLOSED_BY_EXEC | flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= _DESCRIPTOR.size:
            return count, int(_DESCRIPTOR.unpack_from(data)[0])
    return count, None


def free_bytes() -> int | None:
    """Memory that can still be taken: on this machine, in this process's control group, and under its own limit
    (``ulimit -v``). None: nobody says.

    Asked before memory is taken, because taking too much wakes the kernel's killer instead of giving an error.
    """
    known = [*_free_in_machine(), *_free_in_cgroup(), *_free_in_process()]
    return min(known) if known else None


def _free_in_machine() -> Iterator[int]:
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _free_in_cgroup() -> Iterator[int]:
    """Control groups of both versions: this process's own and those above it."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, own = line.split(":", 2)
        if number == "0":
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / own.strip("/")  # in a container possibly the host's path, which is not there; the root is
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, used = ((folder / name).read_text().strip() for name in names[:2])
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if limit != "max":
                    yield max(0, int(limit) - int(used) + int(stat.get(names[2], 0)))
            except (OSError, ValueError):
                continue


def _free_in_process() -> Iterator[int]:
    try:
        lines = (_PROC / "self/limits").read_text().splitlines()
        used = int((_PROC / "self/statm").read_text().split()[0]) * _PAGE_BYTES
    except (OSError, ValueError):
        return
    for line in lines:
        if line.startswith("Max address space") and (limit := line.split()[3]) != "unlimited":
            yield max(0, int(limit) - used)


def _map(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The memory as a tensor that unmaps it when the last view goes; keeps no descriptor, unlike Python's mmap."""
    try:
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            path = f"/proc/self/fd/{descriptor}"
            tensor = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"mapping it failed: {error}") from error
    tensor[::_PAGE_BYTES].amax()  # enters every page into this process's page table, so that nothing faults later
    return tensor


def _refused(num_bytes: int, why: str, number: int | None) -> SegmentError:
    return SegmentError(f"no shared memory of {num_bytes:,} bytes: {why}", number or 0)
