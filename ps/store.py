"""The store: one object whose methods are the RPCs, in snake_case.

Knows neither protobuf nor grpc; safe to call from many threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stratagem.cluster.task import TaskId
from stratagem.cluster.units import Unit
from stratagem.errors import PeerUnavailableError
from stratagem.ps.checkpointing import Checkpointing
from stratagem.ps.commits import Commits
from stratagem.ps.copies import StoreCopies
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import Sender, is_fenced
from stratagem.ps.specs import Limits
from stratagem.ps.state import StoreState, new_epoch
from stratagem.ps.sync_steps import StepKey
from stratagem.ps.variables import Variables
from stratagem.ps.waiting import Call, wait
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.heap import give_back_freed_memory

FRAMES_TIMEOUT_S = 30.0
"""Seconds that a control message waits for its frames; they leave the worker before it."""


@dataclasses.dataclass(frozen=True)
class Greeting:
    server: Sender
    store_epoch: int
    next_sequence: int
    num_ps: int
    """Of how many ps this is one; 0: it has not heard."""


class Store:
    """A parameter server without its wire.

    Requests of one kind live together: ``variables`` (create, assign, pull, stage), ``commits`` (prepare, commit,
    close), ``checkpoints`` (hold, save, restore). ``frames_timeout_s``: see :class:`StoreState`; ``folders``: where
    requests may write and read checkpoints, None: everywhere.
    """

    def __init__(
        self,
        task: str = "ps:0",
        limits: Limits | None = None,
        *,
        frames_timeout_s: float = FRAMES_TIMEOUT_S,
        folders: AllowedFolders | None = None,
    ) -> None:
        self.task = task
        self.incarnation = 0
        """Of this process; set once the chief has issued it."""
        self.state = StoreState(limits or Limits(), new_epoch(0), frames_timeout_s, task)
        self.variables = Variables(self.state)
        self.commits = Commits(self.state)
        self.checkpoints = Checkpointing(self.state, TaskId.parse(task).index, folders)
        self.copies = StoreCopies(task, self.state, self.checkpoints, lambda: self.incarnation)

    def hello(self, sender: Sender, next_sequence: int, abandoned: Iterable[int] = ()) -> Greeting:
        """Introduces a sender. It comes after a loss: what it staged is dropped, its lane closed, and requests that it
        has abandoned are not waited for. FencedError: the incarnation was declared dead."""
        state = self.state
        with state.changed:
            if sender.task.startswith("ps:"):  # of a backup there is one process
                state.senders.fence(sender.task, sender.incarnation - 1)
            state.senders.check(sender)
            expected = state.senders.hello(sender, next_sequence, abandoned)
            state.staging.drop_all(sender)
            lane = state.senders.lanes.get(sender.key)
            if lane is not None:
                self.close_lane(sender, lane)
                lane.close(PeerUnavailableError(f"{sender} introduced itself again"))
            state.changed.notify_all()
            return Greeting(Sender(self.task, self.incarnation), state.store_epoch, expected, state.num_ps)

    def open_lane(self, sender: Sender, lane: ReplyLane) -> None:
        """Replies to the sender go over ``lane`` from now on; a lane that it replaces ends. FencedError: the
        incarnation was declared dead. StaleStoreError: this ps went back to a checkpoint since the sender said
        Hello."""
        state = self.state
        with state.changed:
            state.senders.check(sender)
            state.senders.window(sender)
            state.senders.refused.pop(sender.key, None)
            replaced = state.senders.lanes.get(sender.key)
            state.senders.lanes[sender.key] = lane
            if replaced is not None:
                replaced.close(PeerUnavailableError(f"{sender} opened another lane"))
            state.changed.notify_all()

    def close_lane(self, sender: Sender, lane: ReplyLane) -> None:
        """A lane ended: what came over it and waits for a commit is dropped."""
        state = self.state
        with state.changed:
            if state.senders.lanes.get(sender.key) is lane:  # else another has replaced it
                del state.senders.lanes[sender.key]
                state.staging.drop_all(sender)
            if state.backup is not None:
                state.backup.lost(lane)

    def give_back(self) -> None:
        """The last lane is gone: of what was for frames on their way nothing is kept."""
        for locked in [*self.state.locked_groups.values()]:
            if not locked.spec.is_table:  # of a table none is shared, and to make its first rows may take minutes
                with locked.lock:  # nobody reads a version that was shared
                    locked.publisher.outdate()
        self.state.memory.empty()
        give_back_freed_memory()

    def fence(self, sender: Sender, task: str, incarnation: int, call: Call) -> list[tuple[StepKey, Unit]]:
        """Refuses incarnations of ``task`` up to ``incarnation``; answers once none of them is changing weights, at
        staleness 0 with what they had committed of steps still incomplete here."""
        state = self.state
        with state.changed:
            state.senders.fence(task, incarnation)
            if state.backup is not None:
                state.backup.fence(task, incarnation)
            state.staging.drop_sender(task, incarnation)
            state.changed.notify_all()

            def outside() -> bool:
                return not any(is_fenced(key, task, incarnation) for key in state.inside)

            wait(state, outside, sender, call, None)
            return state.steps.committed_by(task, incarnation)
