"""A commit as a message that keeps what has not changed."""

from __future__ import annotations

from stratagem.cluster.units import Unit, Update
from stratagem.rpc.generated import ps_pb2
from stratagem.rpc.units import update_to_proto
from stratagem.worker.push.wire import MAX_COMMITS, CommitMessage, Transfer


def test_no_message_lives_as_long_as_the_job() -> None:
    """What is taken out of one keeps its memory: a worker grew by 113 bytes a step and ps."""
    commits, given, made = CommitMessage(), (True,), {}
    for step in range(2 * MAX_COMMITS + 1):
        unit = Unit(1, 0, step)
        commits.set_groups(given, (), lambda: [ps_pb2.GroupCommit(group=7)])
        request = commits.commit(
            update_to_proto(Update((unit,), 0)), Transfer(step, 1), None, 1.0, [(unit, 1)], step, 1
        )
        made[id(request)] = request
        assert [each.group for each in request.groups] == [7] and [each.unit.index for each in request.closes] == [step]
    assert len(made) == 3
