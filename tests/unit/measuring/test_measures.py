"""The table of names, and arithmetic on what has them."""

from __future__ import annotations

from pathlib import Path

from stratagem.chief.monitoring.recent import SPACING_S, WINDOW_S, Recent
from stratagem.measuring.measures import MAX_LABELS, MEASURES, PHASES, bounded, labels, since, staleness_bucket


def test_every_name_is_explained_once() -> None:
    assert all(name == each.name and each.meaning.endswith(".") and each.of for name, each in MEASURES.items())


def test_the_guide_names_every_phase() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "why.md").read_text()
    assert [phase for phase in PHASES if f"`{phase}`" not in guide] == []


def test_sums_are_subtracted_gauges_are_not_and_a_new_process_counts_from_nothing() -> None:
    earlier = {"wait_s": 3.0, "threads": 4.0, "sent_bytes|ps:0/tcp": 10.0, "steps": 50.0}
    now = {"wait_s": 5.0, "threads": 2.0, "sent_bytes|ps:0/tcp": 25.0, "steps": 7.0, "push_s": 1.0}
    added = {"wait_s": 2.0, "threads": 2.0, "sent_bytes|ps:0/tcp": 15.0, "steps": 7.0, "push_s": 1.0}
    assert since(now, earlier) == added


def test_of_many_labels_the_largest_are_told() -> None:
    values = {"wait_s": 1.0, **{f"sent_bytes|ps:{index}/tcp": float(index) for index in range(1000)}}
    told = bounded(values)
    assert told["wait_s"] == 1.0 and len(told) == 1 + MAX_LABELS
    assert min(labels(told, "sent_bytes").values()) == 1000 - MAX_LABELS


def test_staleness_is_counted_in_few_buckets() -> None:
    assert [staleness_bucket(behind) for behind in (0, 1, 2, 3, 8, 31, 32)] == ["0", "1", "3", "3", "15", "31", "more"]


def test_the_chief_keeps_few_of_each_task_and_looks_back_some_seconds() -> None:
    recent = Recent()
    for second in range(100):
        recent.add("worker:0", bytes([second]), float(second))
    found = recent.of("worker:0", 99.5)
    assert found.newest == bytes([99]) and found.age_s == 0.5
    assert WINDOW_S - SPACING_S <= found.window_s <= WINDOW_S + SPACING_S
    recent.forget("worker:0")
    assert recent.of("worker:0", 100.0).newest == b""


def test_a_time_in_which_a_task_stood_still_is_in_no_window() -> None:
    recent = Recent()
    for at in (0.0, 0.5, 60.5, 61.0, 61.5):  # stopped between the second and the third
        recent.add("worker:0", str(at).encode(), at)
    found = recent.of("worker:0", 61.5)
    assert (found.earlier, found.newest, found.window_s) == (b"60.5", b"61.5", 1.0)
