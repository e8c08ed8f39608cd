"""Whose values a ps takes that has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.task import TaskId
from stratagem.worker.runtime import WorkerRuntime


def gives(task: str, lead: str, live: dict[str, bool]) -> bool:
    members = tuple(Member(name, "host:1", 1, is_live) for name, is_live in live.items())
    runtime: Any = WorkerRuntime.__new__(WorkerRuntime)
    runtime.task, runtime.config = TaskId.parse(task), SimpleNamespace(task=task)
    runtime.session = SimpleNamespace(membership=Membership(True, members, lead))
    return bool(runtime.gives_values())


@pytest.mark.parametrize(
    ("lead_lives", "givers"), [(True, ["worker:0"]), (False, ["worker:0", "worker:1"])], ids=["lives", "has finished"]
)
def test_the_lead_gives_values_and_the_next_one_when_it_has_finished(lead_lives: bool, givers: list[str]) -> None:
    live = {"ps:0": True, "worker:0": lead_lives, "worker:1": True, "worker:2": True}
    assert [task for task in live if task != "ps:0" and gives(task, "worker:0", live)] == givers


def test_nobody_does_before_there_is_a_lead() -> None:
    assert not gives("worker:0", "", {"worker:0": True})
