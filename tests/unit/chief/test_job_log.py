"""Lines of every task's log: the newest, in the order in which they came, whatever a task sends."""

from __future__ import annotations

import logging

from stratagem.chief.monitoring.recent import MAX_LINES, MAX_OF_TASK, JobLog
from stratagem.rpc.logs import MAX_CHARACTERS, MAX_LINES_AT_ONCE, PACKAGE, LogTail


def test_lines_come_in_order_and_once() -> None:
    log = JobLog()
    log.add("worker:0", [(1.0, "INFO", "a"), (2.0, "WARNING", "b")])
    log.add("ps:0", [(0.5, "ERROR", "c")])
    found = log.since(0)
    assert [(line["task"], line["text"]) for line in found] == [("worker:0", "a"), ("worker:0", "b"), ("ps:0", "c")]
    log.add("worker:0", [(3.0, "INFO", "d")])
    assert [line["text"] for line in log.since(found[-1]["number"])] == ["d"]
    assert log.since(log.since(0)[-1]["number"]) == []


def test_a_task_that_writes_much_drops_its_own_lines_alone() -> None:
    log = JobLog()
    log.add("ps:0", [(0.0, "INFO", "first")])
    for number in range(10 * MAX_LINES):
        log.add("worker:0", [(float(number), "INFO", str(number))])
    found = log.since(0)
    assert found[0]["text"] == "first" and len(found) == 1 + MAX_OF_TASK
    for task in range(2, 100):
        log.add(f"worker:{task}", [(0.0, "INFO", "x")] * MAX_OF_TASK)
    assert len(log.since(0)) == MAX_LINES


def test_words_of_a_task_are_bounded_and_no_level_of_its_own() -> None:
    log = JobLog()
    log.add("worker:0", [(float("nan"), "x onclick=hit()", "y" * 10_000)])
    (line,) = log.since(0)
    assert line["level"] == "INFO" and len(line["text"]) == MAX_CHARACTERS


def test_a_tail_keeps_the_newest_until_they_are_taken() -> None:
    tail = LogTail()
    PACKAGE.setLevel(logging.INFO)
    PACKAGE.addHandler(tail)
    PACKAGE.addHandler(tail)
    try:
        for number in range(2 * MAX_LINES_AT_ONCE):
            PACKAGE.getChild("worker").info("line %d %s", number, "z" * MAX_CHARACTERS)
        PACKAGE.debug("not this one")
    finally:
        PACKAGE.removeHandler(tail)
    PACKAGE.info("nor this one")
    found = tail.take()
    assert len(found) == MAX_LINES_AT_ONCE and tail.take() == []
    assert found[-1][1] == "INFO" and found[-1][2].startswith(f"line {2 * MAX_LINES_AT_ONCE - 1} z")
    assert all(len(text) == MAX_CHARACTERS for _, _, text in found)
