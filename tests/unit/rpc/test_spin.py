"""Looking for a moment before a wait sleeps: only where there is a core for it, and not where it is in vain."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from stratagem.rpc import spin
from stratagem.rpc.spin import Cores, Spin
from tests.polling import until


class Watch:
    """Finds something at the n-th look; counts them."""

    def __init__(self, ready_at: int = 10**9) -> None:
        self.num_looks = 0
        self._ready_at = ready_at

    def look(self) -> bool:
        self.num_looks += 1
        return self.num_looks >= self._ready_at


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a clock by which each wait has three looks: none is cut short by load."""
    clock = iter(range(10**6))
    monkeypatch.setattr(spin.cores, "are_enough", lambda: True)
    monkeypatch.setattr(spin, "time", types.SimpleNamespace(monotonic=lambda: next(clock) * spin.SPIN_S / 3))


def looks(spinner: Spin, watch: Watch) -> int:
    """How often one wait looks."""
    before = watch.num_looks
    spinner.until(watch.look)
    return watch.num_looks - before


@pytest.mark.parametrize(("num_more", "expected"), [(0, True), (1, False), (40, False)])
def test_spins_only_while_no_more_threads_want_to_run_than_there_are_cores(
    tmp_path: Path, num_more: int, expected: bool
) -> None:
    loadavg = tmp_path / "loadavg"
    loadavg.write_text(f"7.27 3.95 3.03 {len(os.sched_getaffinity(0)) + num_more}/147 31030\n")
    assert Cores(str(loadavg)).are_enough() is expected


@pytest.mark.parametrize("text", ["", "0.00 0.00 0.00 0/0 0\n", "0.00 0.00 0.00\n", None])
def test_a_kernel_that_does_not_tell_leaves_no_core_to_spin_on(tmp_path: Path, text: str | None) -> None:
    loadavg = tmp_path / "loadavg"
    if text is not None:
        loadavg.write_text(text)
    assert not Cores(str(loadavg)).are_enough()


def test_what_the_kernel_said_holds_for_a_moment_and_not_longer(tmp_path: Path) -> None:
    loadavg = tmp_path / "loadavg"
    loadavg.write_text("0 0 0 1/1 1\n")
    cores = Cores(str(loadavg))
    assert cores.are_enough()
    loadavg.write_text("0 0 0 9999/1 1\n")
    until(lambda: not cores.are_enough())


def test_what_is_ready_is_found_at_the_first_look_without_asking_for_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin.cores, "are_enough", lambda: pytest.fail("nobody had to wait"))
    assert looks(Spin(), Watch(ready_at=1)) == 1


@pytest.mark.usefixtures("free_cores")
def test_finds_what_comes_within_a_moment() -> None:
    watch = Watch(ready_at=3)
    assert Spin().until(watch.look)
    assert watch.num_looks == 3


def test_sleeps_at_once_without_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin.cores, "are_enough", lambda: False)
    assert looks(Spin(), Watch()) == 1


@pytest.mark.usefixtures("free_cores")
def test_waits_that_last_make_it_look_more_seldom_and_one_that_does_not_makes_it_look_again() -> None:
    spinner, watch = Spin(), Watch()
    spun = [looks(spinner, watch) > 1 for _ in range(200)]
    places = [place for place, yes in enumerate(spun) if yes]
    assert places[:6] == [0, 2, 6, 14, 30, 62]
    assert places[6] - places[5] == places[7] - places[6] == spin.MAX_PAUSE + 1
    while looks(spinner, watch) == 1:
        pass
    soon = Watch(ready_at=2)
    while not spinner.until(soon.look):
        soon.num_looks = 0
    assert looks(spinner, Watch()) > 1
