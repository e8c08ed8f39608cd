"""What the page tells of the past."""

from __future__ import annotations

import pytest

from stratagem.chief.web.story import COLUMNS, JobStory
from stratagem.rpc.status_view import StatusView, TaskState


def look(chief_epoch: int, *workers: tuple[int, int]) -> StatusView:
    """At workers of an incarnation and a step."""
    tasks = [TaskState(f"worker:{n}", "live", incarnation=one, step=step) for n, (one, step) in enumerate(workers)]
    return StatusView(tuple(tasks), chief_epoch, ready=True)


@pytest.mark.parametrize(
    ("looks", "steps"),
    [
        ([look(1, (1, 0), (2, 0)), look(1, (1, 5), (2, 7)), look(1, (1, 9), (2, 8))], [0, 12, 17]),
        ([look(1, (1, 5)), look(1, (2, 0)), look(1, (2, 3))], [0, 0, 3]),
        ([look(2, (1, 0), (2, 0)), look(2, (1, 900), (2, 0)), look(2, (1, 902), (2, 700))], [0, 0, 2]),
    ],
    ids=["two workers", "one that is started again", "a chief that is started again"],
)
def test_steps_are_those_since_the_look_before(looks: list[StatusView], steps: list[int]) -> None:
    story = JobStory()
    for at, status in enumerate(looks):
        story.add(float(at), status)
    assert [point[COLUMNS.index("steps")] for point in story.points] == steps


def test_a_chief_that_is_started_again_does_not_say_that_all_are_there() -> None:
    story = JobStory()
    story.add(0.0, look(2, (1, 0)))
    assert [one["text"] for one in story.since(0)] == ["the chief was restarted: its epoch is 2"]
