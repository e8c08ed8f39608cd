"""Messages and dataclasses with fields of the same names."""

from __future__ import annotations

import dataclasses

from stratagem.rpc.fields import from_message, to_message
from stratagem.rpc.generated import chief_pb2, common_pb2


@dataclasses.dataclass(frozen=True)
class Shown:
    task: str
    live: bool
    step: int = 7
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    label: str = "own"


def test_every_field_comes_from_the_first_message_that_has_it() -> None:
    info = common_pb2.TaskInfo(task="worker:1", live=True)
    progress = chief_pb2.Progress(step=3, metrics={"loss": 0.5})
    assert from_message(Shown, info, progress) == Shown("worker:1", True, 3, {"loss": 0.5})
    assert from_message(Shown, info, progress, step=9).step == 9, "what is given counts"
    held = from_message(Waiting, chief_pb2.GetStatusReply(waiting_for=["ps:0"]))
    assert held.waiting_for == ("ps:0",)


@dataclasses.dataclass(frozen=True)
class Waiting:
    waiting_for: tuple[str, ...] = ()


def test_a_message_takes_the_fields_that_it_has() -> None:
    made = to_message(common_pb2.TaskInfo, Shown("ps:0", False), address="h:1")
    assert made == common_pb2.TaskInfo(task="ps:0", live=False, address="h:1")
