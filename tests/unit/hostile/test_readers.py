"""Readers of what others wrote: whatever the bytes are, they are read or refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.checkpoint.catalog import find_damage, read_step
from stratagem.checkpoint.manifest import Manifest
from stratagem.checkpoint.reading import describe
from stratagem.checkpoint.server_state import ServerState, consolidate
from stratagem.checkpoint.tensor_file import open_tensors
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import CheckpointError, ClusterSpecError, FrameError, ProtocolError, StratagemError
from stratagem.ps import snapshot
from stratagem.ps.frames import kind_of
from stratagem.ps.origin import Origin
from stratagem.rpc.codec import Frame, decode_frame, encode_frame
from stratagem.rpc.generated import frame_pb2
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.shm_receiver import ShmReceiver
from stratagem.rpc.tcp_lane import TcpReceiver
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import frames

NUM_MUTATIONS = 20_000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(1 << 70),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
DEEP = "[" * 100_000


def check_frame(message: bytes) -> bool:
    """Decodes; whether it is a frame."""
    try:
        frame = decode_frame(message)
    except FrameError:
        return False
    assert frame.tensor.nbytes <= len(message) and len(message) - frame.tensor.nbytes <= 1024
    return True


@given(st.binary(max_size=300))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    check_frame(data)
    check_frame(b"\x0d" + data)


def test_mutated_frames_are_read_or_refused() -> None:
    rng = random.Random(1)
    real = [*frames(), encode_frame(frame_pb2.GRADIENT, 1 << 60, 1 << 31, 1 << 60, torch.zeros(2, 3, 0))]
    read = [check_frame(mutated(rng.choice(real), rng)) for _ in range(NUM_MUTATIONS)]
    assert 100 < sum(read) < NUM_MUTATIONS


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=40), st.integers(0, 12), st.binary(max_size=64))
def test_shapes_and_dtypes_that_cannot_be(shape: list[int], dtype: int, payload: bytes) -> None:
    header = frame_pb2.Frame(kind=1, dtype=dtype, shape=shape).SerializeToString()  # type: ignore[arg-type]
    bare = 5 + len(header) + 2
    message = b"\x0d" + struct.pack("<I", bare) + header + b"\x7a" + bytes((len(payload),)) + payload
    check_frame(message)
    with contextlib.suppress(ProtocolError):
        kind_of(decode_frame(message))


def test_a_long_header_does_not_keep_a_short_payload_alive() -> None:
    message = bytearray(encode_frame(frame_pb2.GRADIENT, 1, 1, 0, torch.ones(1)))
    long = b"\x42\xc0\x84\x3d" + bytes(1_000_000)
    padded = b"\x0d" + struct.pack("<I", len(long) + struct.unpack_from("<I", message, 1)[0]) + long + message[5:]
    with pytest.raises(FrameError, match="header of at most 1024 bytes"):
        decode_frame(bytes(padded))


@pytest.mark.parametrize("receiver", [TcpReceiver, ShmReceiver])
def test_random_bytes_in_a_lane_end_it(receiver: Any) -> None:
    rng = random.Random(2)
    size = struct.Struct("<4sBB2xIQQQ" if receiver is TcpReceiver else "<4sBB2xIQQQIQI4x")
    magics = (b"SGF1", b"SGFR", b"SGSG", b"....")
    for _ in range(300):
        outside, inside = socket.socketpair(socket.AF_UNIX)
        lane = receiver(inside, "worker:1", BytesMeter())
        values = [rng.choice((0, 1, 7, 64, (1 << 32) - 1)) for _ in range(6)]
        if receiver is TcpReceiver:
            message = size.pack(rng.choice(magics), rng.randrange(256), rng.randrange(256), *values[:4])
        else:
            message = size.pack(
                rng.choice(magics), rng.randrange(256), rng.randrange(256), *values[:3], 9, *values[3:6]
            )
        outside.sendall(mutated(message, rng) if rng.randrange(2) else message)
        outside.shutdown(socket.SHUT_WR)
        try:
            frame: Frame = lane.receive(0, time.monotonic() + 60)
            assert frame.tensor.nbytes <= len(message) + 8192
        except StratagemError:
            pass
        outside.close()
        lane.close("the test is over")


@given(JSON)
def test_tf_config_is_read_or_refused(value: Any) -> None:
    for text in (
        json.dumps(value),
        json.dumps({"cluster": value, "task": value}),
        json.dumps({"cluster": {"ps": value}}),
    ):
        check_environment({"TF_CONFIG": text})


@given(st.text(max_size=60))
def test_words_in_the_environment_are_read_or_refused(text: str) -> None:
    check_environment({"TF_CONFIG": text})
    check_environment({"RANK": text, "WORLD_SIZE": text, "MASTER_ADDR": text, "MASTER_PORT": text})
    check_environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": text, "MASTER_PORT": "1"})


@pytest.mark.parametrize(
    "environ",
    [
        {"TF_CONFIG": DEEP},
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": "9" * 5000}})},
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["h:1"]}, "task": {"type": ["worker"], "index": 0}})},
        {"RANK": "0", "WORLD_SIZE": "9" * 12, "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        {"RANK": "9" * 5000, "WORLD_SIZE": "9" * 5000, "MASTER_ADDR": "h", "MASTER_PORT": "1"},
    ],
    ids=["deep", "long index", "list as type", "many ranks", "long numbers"],
)
def test_absurd_environments_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ClusterSpecError):
        placement_from_environment(environ)


def check_environment(environ: dict[str, str]) -> None:
    with contextlib.suppress(ClusterSpecError):
        placement_from_environment(environ)


MANIFEST = {
    "format": 1,
    "step": 3,
    "chief_epoch": 1,
    "created": "2026",
    "automatic": True,
    "files": [{"ps": "ps:0", "name": "ps-0.json", "bytes": 2, "sha256": "x"}],
    "next_step": 1,
    "plans": [],
    "accepted": [],
    "applied": [],
}
PART = {
    "format": 1,
    "store_epoch": 1,
    "units": {"closed": [], "open": []},
    "groups": [
        {
            "group": 1,
            "optimizer": "SGD",
            "dtype": "float32",
            "shards": [],
            "slots": [],
            "counts": [],
            "scalars": {},
            "started": [],
            "counter": 1,
            "num_updates": 1,
            "initialized": True,
        }
    ],
}


@st.composite
def altered(draw: st.DrawFn, content: dict[str, Any]) -> str:
    """JSON like ``content``, with other values in some places."""
    copy = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = copy
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
                place[key] = draw(JSON)
                break
            place = place[key]
    return json.dumps(copy)


@given(altered(MANIFEST) | st.sampled_from(["", DEEP, "{}", "[]", "null", '{"files": [{"name": 5}]}']))
@settings(max_examples=200)
def test_manifests_are_read_or_passed_by(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "step-00000003"
        folder.mkdir()
        (folder / "manifest.json").write_text(text)
        (folder / "ps-0.json").write_text("{}")
        ServersManifest.read(folder)
        checkpoints.newest(name)
        with contextlib.suppress(CheckpointError):
            snapshot.check(folder, 0)
        Manifest.read(folder)
        read_step(folder)
        find_damage(folder)


@given(altered(PART) | st.sampled_from(["", DEEP, "{}", "[]", "null"]))
@settings(max_examples=200)
def test_the_part_of_a_ps_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "ps-0.json").write_text(text)
        (folder / "ps-0.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        with contextlib.suppress(CheckpointError):
            snapshot.load(folder, 0)
        with contextlib.suppress(CheckpointError):
            ServerState(folder).forms()


@pytest.mark.parametrize("name", ["manifest.json", "ps-0.json"])
def test_a_pipe_in_a_checkpoint_is_damage(name: str, tmp_path: pathlib.Path) -> None:
    """Whoever looked at the checkpoint waited for somebody to write into it."""
    if name != "manifest.json":
        (tmp_path / "manifest.json").write_text(
            json.dumps({**MANIFEST, "files": [{"ps": "ps:0", "name": name, "bytes": 0, "sha256": "x"}]})
        )
    assert any(name in line for line in with_a_pipe(tmp_path / name, lambda: find_damage(tmp_path)))


def with_a_pipe(path: pathlib.Path, read: Callable[[], Any]) -> Any:
    """What reading gives, or raises, where a pipe that nobody writes into is in the place of a file."""
    os.mkfifo(path)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(read)
        try:
            return found.result(20)
        finally:
            os.close(os.open(path, os.O_RDWR))  # ends who waits


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("host.json", describe),
        ("ps-0.json", lambda folder: snapshot.load(folder, 0)),
        ("ps-0.json", lambda folder: snapshot.held_elsewhere(folder, 1)),
        ("ps-0.json", Origin),
        ("ps-0.json", consolidate),
        ("ps-0.json", lambda folder: ServerState(folder).forms()),
        ("nonce", lambda folder: snapshot.check_nonce(folder, "x", 0)),
    ],
)
def test_a_pipe_where_a_checkpoint_is_described_is_refused(
    name: str, read: Callable[[pathlib.Path], Any], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({**MANIFEST, "files": []}))
    with pytest.raises(CheckpointError, match=r"Not a regular file"):
        with_a_pipe(tmp_path / name, lambda: read(tmp_path))


def test_a_pipe_in_the_place_of_tensors_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ps-0.safetensors"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # the library waits for one with Python's lock in its hand: nobody could end it
    try:
        with pytest.raises(OSError, match="Not a regular file"):
            open_tensors(path)
    finally:
        os.close(writer)


def test_a_file_of_another_size_is_not_read(tmp_path: pathlib.Path) -> None:
    """A hole of 8 TiB would be hashed for hours."""
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    with (tmp_path / "ps-0.json").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(CheckpointError, match=r"ps-0\.json was altered"):
        snapshot.check(tmp_path, 0)
