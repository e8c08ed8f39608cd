"""Strategies: the others.

What SEMANTICS says of each one alone (section "Strategies").
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy.partitioners import place
from stratagem.worker.ring.lane_plan import RankInfo, plan_lanes
from stratagem.worker.ring.schedule import ChunkAction, all_reduce_schedule
from tests.cluster.conftest import Cluster
from tests.conformance.law import cannot, law, only
from tests.conformance.outcomes import Launches
from tests.conformance.replicas import LOCAL_GRADIENTS, steps
from tests.conformance.scenarios import placing
from tests.conformance.strategies import (
    CENTRAL_2,
    ONE,
    PARAMETER_SERVERS,
    PS_ASYNC,
    RING_2,
    RING_2X2,
    TPU,
    Column,
)
from tests.unit.strategy.fake_torch_xla import not_installed

RING = only((RING_2, RING_2X2))
SERVERS = only(PARAMETER_SERVERS)
SPARSE = LOCAL_GRADIENTS | cannot(TPU, "XLA has no sparse gradients: refused, with advice.")
F32 = torch.float32
DEADLINE_S = 60.0


# -- CentralStorageStrategy and OneDeviceStrategy --------------------------------------------------------------------


@law(
    "Central: ONE copy of parameters and variables, on the CPU; gradients are aggregated, then applied once",
    placing.memory,
    without=only(CENTRAL_2),
)
def test_memory_of_central(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["parameters"] == found["variables"] == 1
        assert found["is_mine"] and found["states"] == 2 and found["updates"] == [3.0]
        assert found["parameter_device"] == "cpu"


@law("OneDevice: parameters, run and input prefetch on that device", without=only(ONE))
def test_one_device(column: Column) -> None:
    name = "cuda:0" if torch.cuda.is_available() else "cpu"
    strategy = sg.OneDeviceStrategy(name)
    found = placing.devices(strategy)
    assert found == {"steps": [[name] * 3] * 2, "local_devices": [name]}
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="no CUDA device"):
            sg.OneDeviceStrategy("/gpu:0")


# -- TPUStrategy -----------------------------------------------------------------------------------------------------


@law("TPU: a torch_xla that does not match torch names both versions", without=only(TPU))
def test_mismatch_of_torch_xla(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch_xla": "2.1.0"}[name])
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigurationError) as raised:
        sg.TPUStrategy()
    assert "torch_xla 2.1.0" in str(raised.value) and f"torch {torch.__version__}" in str(raised.value)


@law("TPU: without torch_xla it says what to install", without=only(TPU))
def test_absence_of_torch_xla(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'torch_xla\[tpu\]~="):
        sg.TPUStrategy()


# -- MultiWorkerMirroredStrategy -------------------------------------------------------------------------------------


@law("Ring: `num_replicas_in_sync` = workers × local devices", placing.devices_of_ring, without=RING)
def test_replicas_of_ring(column: Column, results: list[Any]) -> None:
    assert [found["rank"] for found in results] == [0, 1]
    assert {(found["size"], found["local"], found["in_sync"]) for found in results} == {
        (2, column.num_local, 2 * column.num_local)
    }


@law(
    "`CommunicationOptions`: NCCL if every worker has a GPU of its own, else RING; refused where it cannot be had",
    without=RING,
)
def test_communication_options(column: Column) -> None:
    options = sg.CommunicationOptions()
    assert (options.implementation.name, options.bytes_per_pack, options.timeout_seconds) == ("AUTO", 0, None)
    gpus = [RankInfo(f"worker:{rank}", "host", f"GPU-{rank}") for rank in range(2)]
    mixed = [gpus[0], RankInfo("worker:1", "host")]
    ring, nccl = (sg.CommunicationOptions(sg.CommunicationImplementation[name]) for name in ("RING", "NCCL"))
    assert plan_lanes(gpus, options).nccl and plan_lanes(gpus, options).reason == "every worker has a GPU of its own"
    assert not plan_lanes(mixed, options).nccl and not plan_lanes(gpus, ring).nccl
    assert plan_lanes(gpus, nccl).nccl
    with pytest.raises(ConfigurationError, match="worker:1 computes on no CUDA device"):
        plan_lanes(mixed, nccl)


@law("AUTO says what it chose, and why", placing.devices_of_ring, without=RING)
def test_auto_says_why(column: Column, results: list[Any], launches: Launches) -> None:
    for worker in range(column.num_workers):
        log = launches.log(column, f"worker-{worker}")
        assert f"rank {worker} of 2: " in log and "because every worker is on one host" in log


@law("Ring: 2(N−1) messages a node; the first N−1 add, the next N−1 replace", without=RING)
def test_messages_of_a_ring(column: Column) -> None:
    for size in (2, 3, 4, 5):
        for rank in range(size):
            actions = [step.action for step in all_reduce_schedule(size, rank, 10 * size, 10)]
            sends = [action for action in actions if action in (ChunkAction.SEND_OWN, ChunkAction.SEND)]
            receives = [action for action in actions if action in (ChunkAction.REDUCE, ChunkAction.STORE)]
            assert len(sends) == 2 * (size - 1)
            assert receives == [ChunkAction.REDUCE] * (size - 1) + [ChunkAction.STORE] * (size - 1)


@law("a sparse gradient has the rows and values of all replicas", placing.sparse_gradient, without=SPARSE)
def test_sparse_gradient(column: Column, results: list[Any]) -> None:
    by_row = sparse_rows(column)
    for _, found in steps(column, results):
        assert found["sparse"]
        assert found["rows"] == list(by_row) and found["values"] == list(by_row.values())
        assert found["after"] == [1.0 - by_row.get(row, 0.0) for row in range(6)]


@law("`clip_norm` covers sparse gradients", placing.sparse_clipped, without=SPARSE)
def test_sparse_clipped(column: Column, results: list[Any]) -> None:
    by_row = sparse_rows(column)
    norm = math.sqrt(2 * sum(value**2 for value in by_row.values()))
    for _, found in steps(column, results):
        assert found["after"] == pytest.approx([1.0 - 0.5 / norm * by_row.get(row, 0.0) for row in range(6)], rel=1e-5)


def sparse_rows(column: Column) -> dict[int, float]:
    """The gradient of each row that a replica has read; both elements of a row have the same."""
    n = column.num_replicas
    return {0: n * (n + 1) / 2, **{1 + number: 1.0 + number for number in range(n)}}


# -- ParameterServerStrategy -----------------------------------------------------------------------------------------


@law("PS: needs at least one ps and one worker", without=SERVERS)
def test_needs_servers(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = {"worker": {"worker": ["a:1"]}, "ps": {"ps": ["a:1"], "chief": ["b:1"]}}
    for role, missing in (("worker", "needs at least one ps"), ("ps", "worker")):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": clusters[role], "task": {"type": role, "index": 0}}))
        with pytest.raises(ConfigurationError, match=missing):
            sg.strategy_from_environment("ps")
    with pytest.raises(ConfigurationError, match="needs at least one ps"):
        sg.ParameterServerStrategy(sg.SimpleClusterResolver({"worker": ["a:1"]}, "worker", 0))


@law("PS: without a partitioner whole, placed by free bytes, largest first", without=SERVERS)
def test_placement(column: Column) -> None:
    sizes = [[10], [100], [60], [50]]
    load = [0, 0]
    assert place([(size, F32) for size in sizes], None, load) == [
        [(0, 0, 10)],
        [(0, 0, 100)],
        [(1, 0, 60)],
        [(1, 0, 50)],
    ]
    assert load == [440, 440]  # round-robin would be 280 and 600


@law("PS: axis 0 only, contiguous; 13 rows / 5 → 3,3,3,2,2; 10 / 4 → offsets 0,3,6,8,10; rank 0 never", without=SERVERS)
def test_shards(column: Column) -> None:
    (thirteen,) = place([([13], F32)], sg.FixedShardsPartitioner(5), [0])
    assert [rows for _, _, rows in thirteen] == [3, 3, 3, 2, 2]
    (ten,) = place([([10], F32)], sg.FixedShardsPartitioner(4), [0])
    assert [first for _, first, _ in ten] + [sum(ten[-1][1:])] == [0, 3, 6, 8, 10]
    assert place([([], F32)], sg.FixedShardsPartitioner(4), [0, 0]) == [[(0, 0, 1)]]
    with pytest.raises(ConfigurationError, match="axis 0"):
        place([([4, 4], F32)], lambda shape, dtype: [1, 2], [0])


@law("PS: a partitioner is a callable `(shape, dtype)` → shards per axis, such as [6, 1]", without=SERVERS)
def test_own_partitioner(column: Column) -> None:
    asked: list[Any] = []

    def partitioner(shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        asked.append((list(shape), dtype))
        return [6, 1]

    placed = place([([6, 1], F32)], partitioner, [0, 0])
    assert asked == [([6, 1], F32)] and [rows for _, _, rows in placed[0]] == [1] * 6


@law("`FixedShardsPartitioner(n)`: min(n, rows)", without=SERVERS)
def test_fixed_shards(column: Column) -> None:
    assert [sg.FixedShardsPartitioner(n)([6, 1], F32) for n in (1, 4, 6, 9)] == [[1, 1], [4, 1], [6, 1], [6, 1]]


@law(
    "`MinSizePartitioner`: [6,1] float32, min 4, max_shards 6 → 6; max_shards 2 → 2; default 256 KiB",
    without=SERVERS,
)
def test_min_size(column: Column) -> None:
    assert sg.MinSizePartitioner(4, 6)([6, 1], F32) == [6, 1]
    assert sg.MinSizePartitioner(4, 2)([6, 1], F32) == [2, 1]
    assert sg.MinSizePartitioner(4, 10)([6, 1], F32) == [6, 1]
    assert sg.MinSizePartitioner(max_shards=3)([1 << 17], F32) == [2]  # 512 KiB
    assert sg.MinSizePartitioner()([1 << 20], F32) == [1]


@law(
    "`MaxSizePartitioner`: ceil(rows / max(1, floor(max / row bytes))), capped",
    without=SERVERS,
)
def test_max_size(column: Column) -> None:
    assert sg.MaxSizePartitioner(4)([6, 1], F32) == [6, 1]
    assert sg.MaxSizePartitioner(8)([6, 1], F32) == [3, 1]
    assert sg.MaxSizePartitioner(4, 2)([6, 1], F32) == [2, 1]
    assert sg.MaxSizePartitioner(1024)([6, 1], F32) == [1, 1]
    assert sg.MaxSizePartitioner(1)([6, 4], F32) == [6, 1]  # less than a row


@law("PS: a sharded variable is saved as ONE tensor, and restored under any other number of ps", without=only(PS_ASYNC))
def test_sharded_checkpoint(column: Column, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 13)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for num_ps, shards, more in ((2, 5, ["--save", tmp_path]), (3, 4, ["--restore", tmp_path])):
        job = Cluster(
            tmp_path / f"job-{num_ps}",
            1,
            num_ps,
            Path(__file__).parent / "sharded_checkpoint.py",
            ["--shards", str(shards), "--out", str(tmp_path / f"{num_ps}.pt"), *map(str, more)],
            ["--threads", "1"],
        )
        try:
            done = job.finish(DEADLINE_S)
        finally:
            job.close()
        assert done.code == 0, done.stderr
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        found = torch.load(tmp_path / f"{num_ps}.pt", weights_only=True)
        torch.testing.assert_close(
            found, [dict(model.state_dict()), optimizer.state_dict()["state"]], rtol=1e-6, atol=1e-6
        )
        if num_ps == 2:
            saved = sg.load_checkpoint(tmp_path)
            assert {name: list(value.shape) for name, value in saved.items()} == {"weight": [13, 3], "bias": [13]}
            torch.testing.assert_close(saved, found[0], rtol=0, atol=0)
