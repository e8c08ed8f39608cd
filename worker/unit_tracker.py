"""Which unit a step belongs to, and when a unit is complete. A state machine: no I/O.

The script takes a batch, calls ``backward()`` any number of times, ``optimizer.step()`` any number of times, and takes
the next batch. A unit left with gradients but without a step is *accumulating*: it joins the next update. A unit left
with neither is *idle*: the script took batches ahead of time and returns to it (:meth:`focus`), or skips it.
"""

from __future__ import annotations

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ConfigurationError

MAX_IDLE = 64  # batches that a script may be ahead; what it left longer ago it has skipped


class UnitTracker:
    """``in_step``: at staleness 0 a slice of a batch is over with the first update that has it, a step of all workers;
    above 0 each update of a batch names all units whose gradients it has."""

    def __init__(self, *, in_step: bool = False) -> None:
        self._in_step = in_step
        self.current: Unit | None = None
        """The unit that the script works on; None before the first and after the last."""
        self._num_steps = 0
        self.has_gradients = False
        """Whether backward has reached the current unit since its last step."""
        self._accumulating: list[Unit] = []
        self._joined: list[Unit] = []
        """Units beside the current one in its first update: another optimizer's update has their gradients, too."""
        self._idle: list[Unit] = []
        self.left_early: set[Unit] = set()
        """Units that were idle when their loop ended, and are closed: what the script still computes has no unit."""
        self.has_returned = False
        """Whether ``.grad`` has gradients of units that were abandoned and are computed again."""
        self.accumulates = False
        """Whether an update has held the gradients of several units."""
        self.steps_per_unit = 0
        """Steps of the whole unit that had most; 0: none had any. 1 in step where updates hold several units."""

    @property
    def open_units(self) -> tuple[Unit, ...]:
        """Units taken and not yet closed, those of the next update last and oldest first."""
        return (*self._idle, *self.step().units)

    @property
    def has_waiting(self) -> bool:
        """Whether gradients of units that were left wait for the next update."""
        return bool(self._accumulating)

    def has_all(self, num_steps: int) -> bool:
        """Whether the current unit had so many steps, and there is nothing for another one."""
        return self.current is not None and self._num_steps >= num_steps and not self.has_gradients

    @property
    def num_idle(self) -> int:
        """Units taken and left without a gradient."""
        return len(self._idle)

    def start_epoch(self) -> None:
        """A new loop begins: nothing from the last one is still to come. Raises ConfigurationError: it begins inside of
        another one."""
        if self.current is not None:
            raise ConfigurationError(
                "a loop over a distributed dataset starts while a batch of another one is in use, but on parameter "
                "servers an update belongs to batches of one dataset: train on one dataset "
                "(torch.utils.data.StackDataset joins two); to evaluate in between, iterate over the DataLoader "
                "itself; and if you leave an iterator before its end, call its close()"
            )
        self.left_early.clear()

    def take(self, unit: Unit) -> None:
        assert self.current is None, "leave() the last unit first"
        self.current, self._num_steps, self.has_gradients, self.has_returned = unit, 0, False, False

    def focus(self, unit: Unit) -> list[Unit]:
        """The script works on the batch of ``unit`` now, taken earlier. Returns the units that are complete with it."""
        if unit == self.current:
            return []
        closed = self.leave()
        self.left_early.discard(unit)
        if unit in self._idle:
            self._idle.remove(unit)
            self.current = unit
        return closed

    def leave(self, *, is_whole: bool = True) -> list[Unit]:
        """The script goes on to another batch, or, where ``is_whole`` is not so, ends its loop in the middle of this
        one, perhaps by an error between two steps. Returns the units that are complete now."""
        closed, self._joined = self._joined, []
        if self.current is not None:
            if self._in_step and self.accumulates:
                self.steps_per_unit = 1
            elif is_whole:
                self.steps_per_unit = max(self.steps_per_unit, self._num_steps)
            if self._num_steps:
                closed.append(self.current)
            else:
                (self._accumulating if self.has_gradients else self._idle).append(self.current)
            if len(self._idle) > MAX_IDLE:
                closed.append(self._idle.pop(0))
        self.current, self._num_steps, self.has_gradients = None, 0, False
        return closed

    def end(self) -> list[Unit]:
        """The loop is over: gradients that nobody stepped are dropped. Returns all units that were open."""
        closed = self.leave()
        idle, self._idle = self._idle, []
        self.left_early.update(idle)
        return idle + self.drop_waiting() + closed

    def drop_waiting(self) -> list[Unit]:
        """No update names the units whose gradients wait: they stay in ``.grad``. Returns them."""
        waiting, self._accumulating = self._accumulating, []
        return waiting

    def backward(self) -> None:
        self.has_gradients = True

    def step(self) -> Update:
        """The identity of the ``optimizer.step()`` that happens now; without a current unit it is that of those which
        are accumulating, at the end of a loop."""
        current = (self.current,) if self.current else ()
        return Update((*self._joined, *self._accumulating, *current), self._num_steps)

    def stepped(self) -> list[Unit]:
        """The step was accepted. Returns the accumulated units that are complete with it."""
        accumulated, self._accumulating = self._accumulating, []
        self.accumulates |= bool(accumulated)
        self._num_steps += 1
        self.has_gradients = False
        if self._in_step:
            return accumulated
        self._joined += accumulated
        return []

    def abandon(self) -> tuple[Unit, ...]:
        """Forgets every open unit (the job went back to a checkpoint, or they go to others) and returns them."""
        dropped = self.open_units
        self.has_returned |= self.has_gradients or self.has_waiting
        self._accumulating, self._joined, self._idle = [], [], []
        self.current, self._num_steps, self.has_gradients = None, 0, False
        return dropped
