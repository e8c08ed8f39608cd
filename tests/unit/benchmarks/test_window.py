"""Reading /proc: the CPU of a family of processes, the bytes of the loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.window import Reading, between, family_cpu_s, loopback_bytes, read_counters


def add_process(proc: Path, pid: int, parent: int, ticks: tuple[int, int, int, int], name: str = "python") -> None:
    (proc / str(pid)).mkdir()
    times = " ".join(str(value) for value in ticks)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {times} 20 0 1 0")


def test_only_descendants_count_and_names_may_hold_anything(tmp_path: Path) -> None:
    add_process(tmp_path, 1, 0, (1000, 0, 0, 0))
    add_process(tmp_path, 10, 1, (10, 20, 3, 4))
    add_process(tmp_path, 11, 10, (100, 0, 0, 0), name="odd ) name (")
    add_process(tmp_path, 12, 11, (0, 50, 0, 0))
    add_process(tmp_path, 13, 1, (7000, 0, 0, 0))
    (tmp_path / "net").mkdir()
    (tmp_path / "14").mkdir()  # ended while we looked
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert family_cpu_s(10, tmp_path) == {10: 37 * tick_s, 11: 100 * tick_s, 12: 50 * tick_s}


def test_cpu_of_our_tasks_is_told_by_role(tmp_path: Path) -> None:
    commands = ["launcher", "stratagem.cli\0ps\0--task=ps:0", "stratagem.cli ps --task=ps:1", "stratagem.cli\0run"]
    for number, words in enumerate(commands):
        add_process(tmp_path, 10 + number, 10 if number else 1, (10 * (1 + number), 0, 0, 0))
        (tmp_path / str(10 + number) / "cmdline").write_text(f"python\0-m\0{words}\0")
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text("")
    reading = read_counters(10, tmp_path)
    assert reading.cpu_s_by_role == {"ps": pytest.approx(50 / os.sysconf("SC_CLK_TCK"))}
    assert reading.cpu_s == pytest.approx(100 / os.sysconf("SC_CLK_TCK"))


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    add_process(tmp_path, 20, 21, (1, 0, 0, 0))
    add_process(tmp_path, 21, 20, (1, 0, 0, 0))
    assert family_cpu_s(10, tmp_path) == {}


def test_the_loopback_is_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text("Inter-| Receive\n eth0: 5 1 0\n    lo: 123456 7 0 0\n")
    assert loopback_bytes(tmp_path) == 123456
    (tmp_path / "net" / "dev").write_text("Inter-| Receive\n eth0: 5 1 0\n")
    assert loopback_bytes(tmp_path) == 0


def test_this_process_uses_cpu() -> None:
    begin = read_counters(os.getpid())
    while read_counters(os.getpid()).cpu_s == begin.cpu_s:
        sum(range(10_000))
    window = between(begin, read_counters(os.getpid()))
    assert window.cpu_s > 0
    assert window.elapsed_s > 0


def test_a_window_is_a_difference() -> None:
    window = between(Reading(1.0, 2.0, 10), Reading(4.0, 2.5, 110))
    assert (window.elapsed_s, window.cpu_s, window.loopback_bytes) == (3.0, 0.5, 100)
