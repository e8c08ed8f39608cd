"""``python -m benchmarks``: usage errors, rows on stdout, peers that are not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import apply, commands, machine, memory, start
from benchmarks.jobs import JobFailedError
from benchmarks.peers import MPI, TENSORFLOW, PeerMissingError
from benchmarks.runner import Case, Sample
from stratagem.ps.shard_group import ShardGroup
from tests.polling import until

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def fake_case(system: str) -> Case:
    def measure() -> tuple[Sample, Mapping[str, str]]:
        return {"steps_per_s": 3.0}, {"torch": "2"}

    return Case.of_one_row({"benchmark": "apply", "system": system}, measure)


def test_json_rows_on_stdout_and_the_table_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "apply_cases", lambda: [fake_case("a"), fake_case("b")])
    result = CliRunner().invoke(commands.main, ["apply", "--json", "--blocks", "2"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["system"], row["steps_per_s"], row["num_blocks"]) for row in rows] == [("a", 3.0, 2), ("b", 3.0, 2)]
    assert "steps_per_s" in result.stderr


def test_the_table_is_the_result_without_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "apply_cases", lambda: [fake_case("a")])
    result = CliRunner().invoke(commands.main, ["apply"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[2].split()[:2] == ["apply", "a"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing"], "nothing"),
        (["ps", "--blocks", "0"], "--blocks"),
        (["ps", "--workload", "huge"], "huge"),
        (["allreduce", "--sizes", "4KB,many"], "many"),
        (["allreduce", "--workers", "1"], "--workers"),
        (["allreduce", "--peer", "none", "--peer", "gloo"], "--peer none alone"),
        (["train", "--workers", "3", "--workload", "dense"], "number of workers that divides 8 and 64"),
        pytest.param(["ps", "--device", "cuda"], "no CUDA device", marks=without_gpu),
        (["links", "--lane", "shm"], "shm"),
        (["links", "--rates", "fast"], "100mbit,1gbit"),
        (["chief", "--rate", "nan"], "nan is not in the range"),
        (["chief", "--seconds", "0"], "0.0 is not in the range"),
    ],
)
def test_usage_errors_end_with_2(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(commands.main, arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_links_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    result = CliRunner().invoke(commands.main, ["links"])
    assert result.exit_code == 1
    assert "need root" in result.stderr
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert "no ip and no tc" in CliRunner().invoke(commands.main, ["links"]).stderr


def test_rates_are_mbit() -> None:
    assert commands.parse_rates("100mbit, 1gbit") == [100, 1000]


@pytest.mark.parametrize("benchmark", ["ps", "train", "allreduce"])
def test_a_peer_that_is_asked_for_must_be_there(benchmark: str) -> None:
    arguments = [benchmark, "--peer", "tf", "--tf-python", "/no/such/python"]
    result = CliRunner().invoke(commands.main, arguments)
    assert result.exit_code == 2
    assert "/no/such/python" in result.stderr


def test_finding_tensorflow(tmp_path: Path) -> None:
    assert TENSORFLOW.find(None, {}, required=False) is None
    with pytest.raises(PeerMissingError, match="--tf-python or STRATAGEM_TF_PYTHON"):
        TENSORFLOW.find(None, {}, required=True)
    with pytest.raises(PeerMissingError, match="found none"):
        TENSORFLOW.find(None, {"STRATAGEM_TF_PYTHON": sys.executable}, required=False)
    good = tmp_path / "python"
    good.write_text("#!/bin/sh\nexit 0\n")
    good.chmod(0o755)
    assert TENSORFLOW.find(str(good), {"STRATAGEM_TF_PYTHON": "/other"}, required=True) == str(good)


def test_a_peer_is_found_from_the_folder_of_a_job_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    assert TENSORFLOW.find("./python", {}, required=True) == str(tmp_path / "python")
    assert TENSORFLOW.find("true", {}, required=True) == "true"  # of the PATH


def test_finding_a_peer_that_needs_a_program_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    good = tmp_path / "python"
    good.write_text("#!/bin/sh\nexit 0\n")
    good.chmod(0o755)
    assert MPI.find(None, {}, required=False) is None
    for python, required in [(None, True), (str(good), False)]:
        with pytest.raises(PeerMissingError, match="expected mpirun for --peer mpi on the PATH"):
            MPI.find(python, {}, required=required)
    (tmp_path / "mpirun").symlink_to(good)
    assert MPI.find(None, {"STRATAGEM_MPI_PYTHON": str(good)}, required=True) == str(good)


def test_apply_measures_and_checks_a_small_group() -> None:
    for case in apply.apply_cases(num_parameters=300_000):
        (sample,), versions = case.measure()
        assert set(sample) == {"apply_ms", "gbs", "roofline_gbs", "of_roofline", "cpu_s_per_apply"}
        assert versions["torch"]


def test_a_wrong_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardGroup, "apply", lambda self, parts, present: None)
    with pytest.raises(apply.WrongUpdateError, match=r"torch\.optim\.SGD"):
        apply.apply_cases(num_parameters=1000)[0].measure()


def test_the_machine_is_described(tmp_path: Path) -> None:
    assert set(machine.describe_machine()) == {"processor", "num_cores", "load_1min", "kernel"}
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : x\nmodel name\t: Fast CPU\n")
    assert machine.processor_name(cpuinfo) == "Fast CPU"
    assert machine.processor_name(tmp_path / "none")


def test_a_job_is_timed_with_all_its_processes_and_a_failed_one_is_no_sample() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    sample = start.run_to_end([sys.executable, "-c", child])
    assert sample["cpu_s"] is not None and sample["cpu_s"] >= 0.3
    with pytest.raises(JobFailedError, match=r"(?s)ended with exit code 3:.*no accuracy"):
        start.run_to_end([sys.executable, "-c", "import sys; print('no accuracy'); sys.exit(3)"])


def test_the_memory_of_processes_is_watched_by_role() -> None:
    code = "import sys; held = bytearray(b'x') * (64 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    watch = memory.Watch(os.getpid(), lambda pid: "worker" if pid == child.pid else "")
    with watch.running():
        child.stdout.readline()
        until(lambda: (peak := watch.of("worker")) is not None and peak.pss_bytes >= 64 << 20)
        peak = watch.of("worker")
        assert peak is not None
    child.communicate()
    assert peak.usual_bytes <= peak.pss_bytes and peak.shared_bytes < 64 << 20
    assert watch.of("ps") is None


def test_the_proportional_size_of_a_process_is_read() -> None:
    rollup = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nPss: 2048 kB\nPss_Shmem: 1024 kB\n"
    assert memory.read_pss(rollup) == memory.Peak(2 << 20, 1 << 20)
