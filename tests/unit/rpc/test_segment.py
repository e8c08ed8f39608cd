"""Shared memory: what one side writes the other reads, nothing is left behind, and a bad peer cannot do harm."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stratagem.errors import SegmentError
from stratagem.rpc import segment as module
from stratagem.rpc.segment import Segment, free_bytes, receive_descriptor
from tests.file_sizes import file_size_limit

NUM_BYTES = 10_000


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:stratagem")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def passed_on(segment: Segment, pair: tuple[socket.socket, socket.socket]) -> int:
    """The segment's descriptor as a peer gets it."""
    segment.send_to(pair[0], b"here it is")
    message, descriptor = receive_descriptor(pair[1], 10)
    assert message == b"here it is"
    assert descriptor is not None
    return descriptor


def test_what_one_side_writes_the_other_reads(pair: tuple[socket.socket, socket.socket]) -> None:
    before = num_mappings(), num_descriptors()
    own = Segment.create(NUM_BYTES)
    assert own.tensor.dtype == torch.uint8
    assert own.tensor.shape == (NUM_BYTES,)
    assert not own.tensor.any()
    theirs = Segment.attach(passed_on(own, pair), NUM_BYTES)
    own.stop_sharing()
    assert (num_mappings(), num_descriptors()) == (before[0] + 2, before[1])
    own.tensor[7] = 70
    theirs.tensor[8] = 80
    assert theirs.tensor[7:9].tolist() == own.tensor[7:9].tolist() == [70, 80]
    own.close()
    theirs.close()
    assert (num_mappings(), num_descriptors()) == before


def test_the_last_view_keeps_the_memory() -> None:
    before = num_mappings()
    segment = Segment.create(NUM_BYTES)
    view = segment.tensor[4096:8192].view(torch.float32)
    segment.close()
    assert segment.tensor.numel() == 0
    view.fill_(1.5)
    assert view.sum().item() == 1536
    assert num_mappings() == before + 1
    del view
    assert num_mappings() == before


def test_a_received_descriptor_is_not_inherited(pair: tuple[socket.socket, socket.socket]) -> None:
    segment = Segment.create(NUM_BYTES)
    descriptor = passed_on(segment, pair)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    segment.close()


def test_sharing_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    segment = Segment.create(NUM_BYTES)
    segment.stop_sharing()
    with pytest.raises(ValueError, match="not shared any more"):
        segment.send_to(pair[0], b"x")
    segment.close()


def test_a_message_without_a_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(b"nothing")
    assert receive_descriptor(pair[1], 7) == (b"nothing", None)


def test_nobody_can_shrink_it(pair: tuple[socket.socket, socket.socket]) -> None:
    segment = Segment.create(NUM_BYTES)
    descriptor = passed_on(segment, pair)
    for size in (0, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    segment.close()


def shrinkable() -> int:
    descriptor = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, NUM_BYTES)
    return descriptor


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), NUM_BYTES)
        return os.dup(file.fileno())


def too_short() -> int:
    descriptor = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, NUM_BYTES - 1)
    return descriptor


def unwritable() -> int:
    descriptor = os.memfd_create("fixed", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, NUM_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    return descriptor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shrinkable, "sealed against shrinking"),
        (plain_file, "expected a memfd|sealed against shrinking"),  # tmpfs files know seals, other files do not
        (unwritable, "not against writing"),  # torch kept a descriptor of each that could not be mapped
        (too_short, "expected a shared segment of 10,000 bytes, got 9,999"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "expected a shared segment of 10,000 bytes, got 0"),
    ],
)
def test_only_memory_that_stays_is_mapped(make: Callable[[], int], message: str) -> None:
    before = num_mappings(), num_descriptors()
    with pytest.raises(SegmentError, match=message):
        Segment.attach(make(), NUM_BYTES)
    assert (num_mappings(), num_descriptors()) == before


def test_a_limit_on_file_sizes() -> None:
    before = num_mappings(), num_descriptors()
    refused = pytest.raises(SegmentError, match=r"67,108,865 bytes: File too large \(RLIMIT_FSIZE")
    with file_size_limit(64 << 20), refused as caught:
        Segment.create((64 << 20) + 1)
    assert caught.value.errno == errno.EFBIG
    assert (num_mappings(), num_descriptors()) == before


def test_more_than_there_is() -> None:
    before = num_mappings(), num_descriptors()
    with pytest.raises(SegmentError, match=r"1,125,899,906,842,624 bytes: only [\d,]+ are free") as caught:
        Segment.create(1 << 50)
    assert caught.value.errno == errno.ENOMEM
    assert (num_mappings(), num_descriptors()) == before


def test_an_address_space_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_mappings(), num_descriptors()

    def from_file(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("unable to mmap 10000 bytes")

    monkeypatch.setattr(torch, "from_file", from_file)
    with pytest.raises(SegmentError, match="10,000 bytes: mapping it failed: unable to mmap"):
        Segment.create(NUM_BYTES)
    assert (num_mappings(), num_descriptors()) == before


def test_a_system_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(SegmentError, match="no memfd_create") as caught:
        Segment.create(NUM_BYTES)
    assert caught.value.errno == errno.ENOSYS


def test_no_bytes_are_no_segment() -> None:
    with pytest.raises(SegmentError, match="at least 1 byte, got 0"):
        Segment.create(0)


def test_made_in_inference_mode_written_outside() -> None:
    with torch.inference_mode():
        segment = Segment.create(NUM_BYTES)
    segment.tensor.fill_(3)
    assert segment.tensor.sum().item() == 3 * NUM_BYTES
    segment.close()


def test_the_tightest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "_CGROUPS", tmp_path / "cgroup")
    assert free_bytes() is None
    own = tmp_path / "cgroup/pod/container"
    own.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    4 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/\n0::/pod/container\n")
    assert free_bytes() == 4096
    for folder, limit in ((own, "max"), (own.parent, "3000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("1500\n")
        (folder / "memory.stat").write_text("anon 7\ninactive_file 100\n")
    assert free_bytes() == 3000 - 1500 + 100
    title = "Max address space         "
    for soft, expected in (("unlimited", 1600), ("42000", 42000 - 10 * 4096)):
        (tmp_path / "proc/self/limits").write_text(f"Limit  Soft Limit\n{title}{soft:21}unlimited            bytes\n")
        (tmp_path / "proc/self/statm").write_text("10 7 5 1 0 4 0\n")
        assert free_bytes() == expected
    (own / "memory.max").write_text("1000\n")
    assert free_bytes() == 0


@pytest.mark.parametrize("sees_all", [True, False], ids=["on the host", "in a container"])
def test_the_limit_of_a_control_group_of_version_1_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees_all: bool
) -> None:
    monkeypatch.setattr(module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "_CGROUPS", tmp_path / "cgroup")
    group = tmp_path / "cgroup/memory" / ("docker/1f" if sees_all else "")
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/docker/1f\n")
    (group / "memory.limit_in_bytes").write_text("3000\n")
    (group / "memory.usage_in_bytes").write_text("1500\n")
    (group / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100\n")
    assert free_bytes() == 3000 - 1500 + 100
