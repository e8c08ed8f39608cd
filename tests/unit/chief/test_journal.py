"""The journal: what was written is known again, whatever a crash left of the last line."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratagem.chief.counting.metric_states import MetricState, MetricStates, encode_state
from stratagem.chief.journal.history import JobHistory, encode_positions
from stratagem.chief.journal.journal import NAME, Journal, replay
from stratagem.chief.leasing.evaluations import Pin
from stratagem.cluster.units import Plan, Topic, Unit, UnitBitmap
from stratagem.errors import ConfigurationError, JournalLostError
from tests.file_sizes import file_size_limit

PLAN = {"num_examples": 9, "batch_size": 2, "drop_last": True, "shuffle": False, "num_slices": 2}


def take_over(path: Path) -> None:
    journal = Journal(str(path.parent))
    journal.write("chief", epoch=2)
    journal.close()


def replace(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.write_bytes(path.with_suffix(".old").read_bytes())
    path.with_suffix(".old").unlink()


@pytest.mark.parametrize(
    ("lose", "how"),
    [
        (take_over, "was written by another chief"),
        (Path.unlink, "was removed or replaced"),
        (replace, "was removed or replaced"),
    ],
)
def test_a_journal_that_is_lost_takes_nothing_more(tmp_path: Path, lose: Callable[[Path], None], how: str) -> None:
    journal, path = Journal(str(tmp_path)), tmp_path / NAME
    journal.write("chief", epoch=1)
    lose(path)
    before = path.read_bytes() if path.exists() else b""
    for _ in range(2):
        with pytest.raises(JournalLostError, match=how):
            journal.write("ready")
    assert not path.exists() or path.read_bytes() == before, "what is not acknowledged is not in the way of the next"
    journal.close()


def test_a_chief_knows_what_another_writes_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Journal(str(tmp_path))
    first.write("chief", epoch=1)

    def replay_beside(path: Path) -> JobHistory:
        history = replay(path)
        if first.history.newest_incarnation < 3:
            first.write("join", task="ps:0", incarnation=first.history.newest_incarnation + 1)
        return history

    monkeypatch.setattr("stratagem.chief.journal.journal.replay", replay_beside)
    second = Journal(str(tmp_path))
    assert second.history.newest_incarnation == 3
    second.write("chief", epoch=2)
    with pytest.raises(JournalLostError, match="was written by another chief"):
        first.write("ready")
    assert replay(tmp_path / NAME) == second.history
    first.close()
    second.close()


def test_a_journal_that_cannot_be_written_takes_nothing_more(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.write("chief", epoch=1)
    refused = pytest.raises(JournalLostError, match=r"cannot be written .*File too large.*--state-dir")
    with file_size_limit(10), refused:
        journal.write("ready")
    with pytest.raises(JournalLostError):
        journal.write("ready")
    journal.close()


def test_a_journal_whose_summary_cannot_be_written_closes_no_file_twice(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), compact_bytes=10)
    (tmp_path / NAME).with_suffix(".tmp").mkdir()
    with pytest.raises(JournalLostError, match=r"cannot be written .*Is a directory"):
        journal.write("chief", epoch=1)
    journal.close()


@pytest.mark.parametrize("name", [NAME, "journal.tmp"])
def test_a_journal_that_cannot_be_begun_is_refused_in_words(tmp_path: Path, name: str) -> None:
    """A full disk was "the output: No space left on device"."""
    (tmp_path / NAME).write_text('{"kind":"stopped","reason":"done"}\n')
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(JournalLostError, match=r"cannot be kept \(Is a directory\): give the chief a --state-dir"):
        Journal(str(tmp_path))


def test_a_full_disk_under_a_new_journal_is_to_be_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, **_: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(JournalLostError, match=r"cannot be kept \(No space left.*\): free some space there$"):
        Journal(str(tmp_path))


def write_all(journal: Journal) -> None:
    journal.write("chief", epoch=4)
    journal.write("join", task="worker:0", incarnation=1, pid=10)
    journal.write("join", task="worker:1", incarnation=2, pid=20)
    journal.write("join", task="ps:0", incarnation=3, pid=30)
    journal.write("ready")
    journal.write("initialized", tasks=["ps:0"])
    journal.write("plan", dataset=1, plan={**PLAN, "staleness": math.inf, "seed": 7})
    journal.write("step", durable=False, step=5, units=[[1, 0, 2], [1, 0, 3]])
    journal.write("step", durable=False, step=6, units=[[1, 0, 4], [1, 0, 5]])
    journal.write("accepted", durable=False, units=[[1, 0, 2], [1, 0, 3]], oldest_step=6)
    journal.write("close_step", step=6, included=[[1, 0, 4]])
    for stop in (2, 4):
        journal.write("ended", dataset=1, epoch=0, stop=stop)
    for task, dataset in (("worker:0", 2), ("worker:1", 1)):
        journal.write("left", task=task, dataset=dataset, epoch=0)
        journal.write("left_group", task=task, group="fit 1")
    journal.write("over", task="worker:0", incarnation=1, done=False)
    journal.write("join", task="worker:0", incarnation=4, pid=40)
    journal.write("over", task="worker:1", incarnation=2, done=True)
    for epoch in (0, 2):
        journal.write("left", task="worker:0", dataset=1, epoch=epoch)
        journal.write("left_group", task="worker:0", group=f"fit {epoch}")
    journal.write("in_group", task="worker:0", group="fit 0")
    journal.write("prepared", task="ps:0", incarnation=3)
    journal.write("put_back", task="ps:0", incarnation=3)
    journal.write("lost", task="ps:0", units=[[1, 0, "07"]])
    journal.write("lost", task="ps:0", units=[[1, 0, "06"], [1, 1, "01"]])
    journal.write("lost", task="ps:1", units=[[1, 0, "01"]])
    journal.write("checkpoint", path="/c/step-00000006")


def test_who_left_a_dataset_last_comes_last(tmp_path: Path) -> None:
    """The chief that follows takes the order of the passes from it."""
    journal = Journal(str(tmp_path))
    for dataset, epoch in ((1, 0), (2, 0), (1, 1)):
        journal.write("left", task="worker:0", dataset=dataset, epoch=epoch)
    journal.close()
    assert list(journal.history.left.items()) == [(("worker:0", 2), 0), (("worker:0", 1), 1)]


def test_a_ps_that_is_to_be_looked_at_stays_known_where_the_job_starts_again(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.write("put_back", task="ps:0", incarnation=3)
    journal.write("roll_back", accepted=encode_positions({}), reopen=True, put_back={"ps:1": 5})
    assert journal.history.put_back == {"ps:1": 5}
    journal.write("roll_back", accepted=encode_positions({}))
    journal.close()
    assert not journal.history.put_back


EXPECTED = JobHistory(
    chief_epoch=4,
    newest_incarnation=4,
    live={"worker:0": 4, "ps:0": 3},
    pids={"worker:0": 40, "worker:1": 20, "ps:0": 30},
    prepared={"ps:0": 3},
    put_back={"ps:0": 3},
    done={"worker:1": 2},
    fenced={"worker:0": 1, "worker:1": 2},
    ready=True,
    initialized=["ps:0"],
    plans={1: Plan(9, 2, drop_last=True, shuffle=False, num_slices=2, staleness=math.inf, seed=7)},
    accepted={(1, 0): UnitBitmap.of([2, 3])},
    ended={(1, 0): 4},
    left={("worker:0", 1): 2},
    left_groups={("worker:0", "fit 2")},
    steps={6: (Unit(1, 0, 4),)},
    next_step=7,
    lost={"ps:0": {(1, 0): UnitBitmap.of([0, 1, 2]), (1, 1): UnitBitmap.of([0])}, "ps:1": {(1, 0): UnitBitmap.of([0])}},
    checkpoint="/c/step-00000006",
)


def test_a_replay_gives_what_was_written(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    write_all(journal)
    journal.close()
    again = Journal(str(tmp_path))
    again.close()
    assert again.history == journal.history == EXPECTED


def test_without_a_directory_nothing_is_kept(tmp_path: Path) -> None:
    journal = Journal("")
    write_all(journal)
    journal.close()
    assert journal.history == EXPECTED


def test_what_was_lost_and_comes_again_is_lost_no_more(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.write("lost", task="ps:0", units=[[1, 0, "07"]])
    journal.write("roll_back", accepted=[[1, 0, "01"]])
    assert journal.history.updates_lost == 3, "they stay closed"
    journal.write("roll_back", accepted=[[1, 0, "01"]], reopen=True)
    assert journal.history.updates_lost == 1
    journal.close()


@pytest.mark.parametrize(
    "tail", [b'{"kind":"lost","ta', b'{"kind":"lost","task":"ps:0","units":[]}', b"\x00\x00\x00", b"nonsense\n"]
)
def test_a_torn_last_line_is_left_out_and_written_over(tmp_path: Path, tail: bytes) -> None:
    journal = Journal(str(tmp_path))
    write_all(journal)
    journal.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(tail)
    torn = Journal(str(tmp_path))
    assert torn.history == EXPECTED
    torn.write("lost", task="ps:1", units=[[1, 0, "ff"]])
    torn.close()
    again = Journal(str(tmp_path))
    again.close()
    assert again.history.updates_lost == 12


def test_a_bad_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"kind":"ready"}\n{"kind":"what"}\n{"kind":"ready"}\n')
    with pytest.raises(ConfigurationError, match=r"line 2 of .*journal\.jsonl cannot be read"):
        Journal(str(tmp_path))


@pytest.mark.parametrize("line", [b'{"kind":"what"}\n', b'{"kind":"summary","chief_epoch":4}\n', b"[]\n"])
def test_a_whole_line_of_another_version_is_refused_also_at_the_end(tmp_path: Path, line: bytes) -> None:
    """It was cut off as one that is torn: of a journal that had been made one line of, that was all of the job."""
    (tmp_path / NAME).write_bytes(line)
    with pytest.raises(ConfigurationError, match=r"line 1 of .*another version of Stratagem may have written it"):
        Journal(str(tmp_path))
    assert (tmp_path / NAME).read_bytes() == line


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "chief", "epoch": "x"},
        {"kind": "chief", "epoch": 1, "num_ps": 1 << 70},
        {"kind": "chief", "epoch": 1, "num_ps": []},
        {"kind": "join", "task": 5, "incarnation": 1},
        {"kind": "join", "task": "worker:0", "incarnation": [1]},
        {"kind": "join", "task": "worker:0", "incarnation": 1, "pid": 1 << 40},
        {"kind": "over", "task": 5, "incarnation": 1, "done": True},
        {"kind": "accepted", "units": [[1, 0, 1 << 70]], "oldest_step": 1},
        {"kind": "accepted", "units": [[1, 0, 1 << 27]], "oldest_step": 1},
        {"kind": "accepted", "units": [[1, 0, -1]], "oldest_step": 1},
        {"kind": "plan", "dataset": 1, "plan": PLAN | {"batch_size": 0}},
        {"kind": "initialized", "tasks": [[]]},
        {"kind": "wanted", "workers": "2", "ps": 2},
    ],
    ids=lambda record: json.dumps(record)[:60],
)
def test_a_journal_that_somebody_has_altered_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    """The chief ended in a traceback, at once or later; the plan was cut off as a torn line."""
    text = json.dumps(record) + "\n"
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ConfigurationError, match="Move the file away"):
        Journal(str(tmp_path))
    assert (tmp_path / NAME).read_text() == text


def test_a_number_of_ps_that_cannot_be_is_refused_before_anything_is_made_of_it() -> None:
    """2**40 of them were named one by one."""
    with pytest.raises(TypeError, match="num_ps is 4194304"):
        JobHistory().apply({"kind": "routed", "num_ps": 1 << 22})


def test_a_long_journal_is_replaced_by_its_summary(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), compact_bytes=2000)
    write_all(journal)
    for _ in range(200):
        journal.write("lost", durable=False, task="ps:0", units=[])
    journal.close()
    assert (tmp_path / NAME).stat().st_size < 3000
    again = Journal(str(tmp_path))
    again.close()
    assert again.history == EXPECTED


def test_a_job_that_is_over_is_followed_by_a_new_one(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    write_all(journal)
    journal.write("stopped", reason="every worker has finished")
    journal.close()
    again = Journal(str(tmp_path))
    again.close()
    assert again.history == JobHistory(chief_epoch=4, newest_incarnation=4, earlier_incarnations=4)
    assert again.history.is_new


def test_a_roll_back_replaces_what_was_accepted(tmp_path: Path) -> None:
    journal = Journal("")
    write_all(journal)
    journal.write("roll_back", accepted=[[1, 0, "04"]])
    assert journal.history.accepted == {(1, 0): UnitBitmap.of([2])}


def test_work_that_was_taken_back_stays_so_for_the_next_chief(tmp_path: Path) -> None:
    """It ended the job with 0: only the chief that had put the ps back knew that what was done is lost."""
    journal = Journal(str(tmp_path))
    journal.write("roll_back", accepted=[], undone="ps:0 lost its memory")
    journal.write("roll_back", accepted=[], undone="")  # another ps, which takes nothing more with it
    journal.close()
    again = Journal(str(tmp_path))
    assert again.history.undone == "ps:0 lost its memory"
    again.write("roll_back", accepted=[], reopen=True)
    assert not again.history.undone, "it is made again"
    again.close()


def test_a_unit_is_in_one_step_after_a_roll_back() -> None:
    journal = Journal("")
    journal.write("step", durable=False, step=5, units=[[1, 0, 2], [1, 0, 3]])
    journal.write("roll_back", accepted=[])
    journal.write("step", durable=False, step=6, units=[[1, 0, 2], [1, 0, 3]])
    assert list(journal.history.steps) == [6]


def test_what_was_counted_and_decided_is_known_again(tmp_path: Path) -> None:
    fit, evaluation = Topic("fit 1", 0), Topic("evaluation 1", 0)
    states = [MetricState(fit, Unit(1, 0, index), bytes([index])) for index in range(3)]
    pin = Pin(Plan(4, 2, False, shuffle=False), 1, {"ps:0": (1, 5)})
    journal = Journal(str(tmp_path))
    for state in [*states, MetricState(evaluation, Unit(0, 0, 1), b"old")]:
        journal.write("state", durable=False, state=encode_state(state))
    name = ["evaluation 1", 0]
    journal.write("evaluation", name=name, pin=pin.to_record())
    journal.write("evaluation", name=name, pin=dataclasses.replace(pin, attempt=2).to_record())
    journal.write("state", durable=False, state=encode_state(MetricState(evaluation, Unit(0, 0, 0), b"new")))
    journal.write("roll_back", accepted=[[1, 0, UnitBitmap.of([0, 1]).to_bytes().hex()]])
    journal.write("logs", topic=["fit 0", 3], logs=[["loss", 0.5]])
    journal.write("agreed", topic=["fit 1, ends", 0], value=1)
    journal.close()
    again = Journal(str(tmp_path), compact_bytes=1)
    assert again.history == journal.history
    assert again.history.metric_states.page(fit, 0, 99).states == (b"\0", b"\1")
    assert again.history.metric_states.page(evaluation, 0, 99).states == (b"new",)
    assert again.history.metric_states.logs(Topic("fit 0", 3)) == (("loss", 0.5),)
    assert again.history.evaluations[evaluation].attempt == 2
    again.write("lost", task="ps:0", units=[])  # replaces the file by its summary
    again.close()
    summed = Journal(str(tmp_path))
    assert summed.history == again.history and summed.history.agreed == {Topic("fit 1, ends", 0): 1}
    summed.write("anew")
    assert (
        summed.history.metric_states == MetricStates() and not summed.history.evaluations and not summed.history.agreed
    )
    summed.close()


def test_a_large_summary_is_not_written_with_every_record(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), compact_bytes=100)
    for index in range(20):
        state = MetricState(Topic("fit 1", 0), Unit(1, 0, index), bytes(60))
        journal.write("state", durable=False, state=encode_state(state))
    journal.close()
    assert (tmp_path / NAME).read_text().count("\n") > 3


def test_a_chief_that_is_started_for_another_number_of_ps_wants_it(tmp_path: Path) -> None:
    def started(num_ps: int) -> JobHistory:
        journal = Journal(str(tmp_path))
        journal.write("chief", epoch=1, num_ps=num_ps)
        journal.close()
        return journal.history

    assert (started(1).num_ps, started(1).wanted_ps) == (1, 0)
    journal = Journal(str(tmp_path))
    journal.write("wanted", workers=2, ps=3)
    journal.write("prepared", task="ps:0", incarnation=1)
    journal.write("routed", num_ps=3)
    assert journal.history.prepared == {}, "whatever it holds is for another number of ps"
    assert journal.history.initialized == ["ps:0", "ps:1", "ps:2"]
    journal.close()
    after = started(1)
    assert (after.num_ps, after.wanted_ps, after.wanted_workers) == (3, 3, 2), "it was started for 1 before, too"
    after = started(4)
    assert (after.num_ps, after.wanted_ps) == (3, 4)
    journal = Journal(str(tmp_path), compact_bytes=1)
    journal.write("ready")
    journal.close()
    summed = Journal(str(tmp_path))
    summed.close()
    assert dataclasses.asdict(summed.history) == dataclasses.asdict(journal.history)
