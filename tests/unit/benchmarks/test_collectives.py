"""All-reduce: sizes, the known numbers, the loop of a rank, what is refused, and two real jobs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import job_files
from benchmarks.collectives import jobs, loop
from benchmarks.collectives.cases import allreduce_cases
from benchmarks.collectives.loop import RankResult, SizeResult, measure, measure_and_write
from benchmarks.collectives.pattern import PERIOD, Array, WrongSumError, check_sum, checksum, contribution
from benchmarks.collectives.result import bus_bytes, read_ranks, to_samples
from benchmarks.collectives.sizes import parse_sizes
from benchmarks.collectives.stratagem_job import WrongLaneError, check_lane


class FakeBuffer:
    """Adds what the other rank would bring."""

    def __init__(self, num_elements: int, wrong_at: int | None) -> None:
        self._num_elements = num_elements
        self._wrong_at = wrong_at
        self.num_calls = 0

    def fill(self, values: Array) -> None:
        other = contribution(1, self._num_elements) if self._num_elements > 1 else values
        self._values, self._sum = values, np.full_like(values, np.nan)
        self._other = other

    def all_reduce(self) -> None:
        self.num_calls += 1
        self._sum = self._values + self._other
        if self.num_calls == self._wrong_at:
            self._sum[-1] = self._values[-1]

    def result(self) -> Array:
        return self._sum


class FakeSystem:
    rank, size, wire = 0, 2, "float32"

    def __init__(self, wrong_at: int | None = None) -> None:
        self.wrong_at = wrong_at
        self.buffers: list[FakeBuffer] = []

    def buffer(self, num_elements: int) -> FakeBuffer:
        self.buffers.append(FakeBuffer(num_elements, self.wrong_at if num_elements > 1 else None))
        return self.buffers[-1]


def summed(size: int, num_elements: int) -> Array:
    total: Array = sum((contribution(rank, num_elements) for rank in range(size)), np.zeros(num_elements, np.float32))
    return total


def test_sizes_are_powers_of_two() -> None:
    assert parse_sizes("4KB, 1mb,8B") == [4096, 1 << 20, 8]


@pytest.mark.parametrize("text", ["", "4", "KB", "0KB", "6B", "1.5MB", "4KB,,1MB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_sizes(text)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_sum_passes_and_anything_else_does_not(size: int) -> None:
    num_elements = 2 * PERIOD + 1000
    good = summed(size, num_elements)
    check_sum(good, size, "float32")
    shifted = good.copy()
    shifted[4096:8192] = good[8192:12288]
    doubled = good + contribution(1, num_elements)
    missing = good - contribution(size - 1, num_elements)
    stale = np.full_like(good, np.nan)
    for wrong in (shifted, doubled, missing, stale):
        for wire in ("float32", "bfloat16"):
            with pytest.raises(WrongSumError, match=f"the sum over {size} ranks"):
                check_sum(wrong, size, wire)


def test_roundings_to_the_wire_pass_only_on_that_wire() -> None:
    rounded = torch.from_numpy(summed(2, 5000)).bfloat16().float().numpy()
    check_sum(rounded, 2, "bfloat16")
    with pytest.raises(WrongSumError):
        check_sum(rounded, 2, "float32")


def test_one_other_bit_has_another_checksum() -> None:
    result = summed(2, 100)
    other = result.copy()
    other[50] = np.nextafter(other[50], np.float32(0))
    assert checksum(result) == checksum(result.copy()) != checksum(other)


def test_the_loop_counts_what_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TARGET_S", 0.0)
    system = FakeSystem()
    result = measure(system, 4096)
    assert (result.num_bytes, result.num_iterations) == (4096, loop.MIN_ITERATIONS)
    assert system.buffers[0].num_calls == loop.MIN_ITERATIONS + loop.NUM_UNTIMED
    assert result.median_s > 0
    assert result.checksum == checksum(summed(2, 1024))
    monkeypatch.setattr(loop, "TARGET_S", 1e9)
    monkeypatch.setattr(loop, "MAX_ITERATIONS", 7)
    assert measure(FakeSystem(), 4096).num_iterations == 7


@pytest.mark.parametrize("wrong_at", [1, loop.MIN_ITERATIONS + loop.NUM_UNTIMED])
def test_a_wrong_sum_before_or_after_ends_it(monkeypatch: pytest.MonkeyPatch, wrong_at: int) -> None:
    monkeypatch.setattr(loop, "TARGET_S", 0.0)
    with pytest.raises(WrongSumError):
        measure(FakeSystem(wrong_at), 4096)


def test_ranks_leave_files_that_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_files.RESULT_VARIABLE, str(tmp_path / "result.json"))
    monkeypatch.setattr(loop, "TARGET_S", 0.0)
    measure_and_write(FakeSystem(), [4096, 8192], {"fake": "1"})
    (rank,) = read_ranks(tmp_path / "result.json", 1)
    assert [size.num_bytes for size in rank.sizes] == [4096, 8192]
    assert rank.versions == {"fake": "1"}
    with pytest.raises(FileNotFoundError):
        read_ranks(tmp_path / "result.json", 2)


def test_metrics_of_a_job() -> None:
    size = SizeResult(num_bytes=1_000_000, num_iterations=10, median_s=0.001, cpu_s=0.0015, checksum=5)
    slower = dataclasses.replace(size, median_s=0.002, cpu_s=0.0005)
    (sample,), versions = to_samples([RankResult([size], {"a": "1"}), RankResult([slower], {"a": "1"})])
    assert sample == {"median_s": 0.002, "busbw_gbs": pytest.approx(0.5), "cpu_s_per_gb": pytest.approx(2.0)}
    assert versions == {"a": "1"}
    assert bus_bytes(4, 1000) == 1500


@pytest.mark.parametrize("change", [{"checksum": 6}, {"num_iterations": 11}])
def test_ranks_that_differ_are_refused(change: dict[str, int]) -> None:
    size = SizeResult(num_bytes=1000, num_iterations=10, median_s=0.001, cpu_s=0.0, checksum=5)
    other = dataclasses.replace(size, **change)
    with pytest.raises(WrongSumError, match="on every rank"):
        to_samples([RankResult([size], {}), RankResult([other], {})])


def test_rows_have_the_columns_of_the_rules() -> None:
    cases = allreduce_cases(
        4, [4096, 8192], ["shm", "tcp"], "bfloat16", tls=True, gloo=True, tf_python="/somewhere/python"
    )
    rows = [identity for case in cases for identity in case.identities]
    assert [list(row) for row in rows] == [["benchmark", "system", "lane", "wire", "n", "bytes"]] * 10
    assert [(row["system"], row["lane"], row["wire"]) for row in rows[::2]] == [
        ("stratagem", "shm", "float32"),
        ("stratagem", "tcp", "bfloat16"),
        ("stratagem", "tcp+tls", "float32"),
        ("gloo", "tcp", "float32"),
        ("tensorflow", "grpc", "float32"),
    ]
    assert [row["bytes"] for row in rows[:2]] == [4096, 8192]
    assert len(allreduce_cases(2, [4096], ["grpc"], "float32", tls=False, gloo=False, tf_python=None)) == 1


def test_another_lane_than_the_one_asked_for_is_refused() -> None:
    check_lane("shm", "shm")
    check_lane("ring over tcp", "tcp")
    with pytest.raises(WrongLaneError, match="expected the tcp lane, the strategy chose 'shm'"):
        check_lane("shm", "tcp")


@pytest.mark.usefixtures("forked")
def test_gloo_is_measured() -> None:
    samples, versions = to_samples(jobs.run_gloo(2, [4096]))
    assert samples[0]["median_s"] is not None
    assert versions["torch"]


@pytest.mark.usefixtures("forked")
def test_our_lane_is_measured() -> None:
    samples, versions = to_samples(jobs.run_stratagem(2, [1 << 20], "shm", "float32"))
    assert samples[0]["median_s"] is not None
    assert versions["stratagem"]


@pytest.mark.usefixtures("forked")
@pytest.mark.thorough
def test_our_lane_is_measured_under_tls() -> None:
    samples, _ = to_samples(jobs.run_stratagem(2, [1 << 20], "tcp", "float32", tls=True))
    assert samples[0]["median_s"] is not None


def test_results_are_plain_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_files.RESULT_VARIABLE, str(tmp_path / "result.json"))
    monkeypatch.setattr(loop, "TARGET_S", 0.0)
    measure_and_write(FakeSystem(), [4096], {})
    fields = json.loads((tmp_path / "result.rank0").read_text())
    assert set(fields) == {"sizes", "versions"}
