"""Which unit a step belongs to, and when a unit is complete. A state machine: no I/O.

The script takes a batch, calls ``backward()`` any number of times, ``optimizer.step()`` any number of times, and takes
the next batch. A unit left without a step but with gradients is accumulating: it joins the next update.
"""

from __future__ import annotations

from stratagem.cluster.units import Unit, Update


class UnitTracker:
    """Follows the units of one worker."""

    def __init__(self) -> None:
        self._current: Unit | None = None
        self._num_steps = 0
        self._has_gradients = False
        self._accumulating: list[Unit] = []

    @property
    def current(self) -> Unit | None:
        """The unit whose batch the script holds; None before the first and after the last."""
        return self._current

    @property
    def open_units(self) -> tuple[Unit, ...]:
        """Units taken and not yet closed, oldest first."""
        return (*self._accumulating, *((self._current,) if self._current else ()))

    def take(self, unit: Unit) -> None:
        """The script takes the batch of ``unit``."""
        assert self._current is None, "leave() the last unit first"
        self._current = unit

    def leave(self) -> list[Unit]:
        """The script is done with the current batch. Returns the units that are complete now."""
        closed: list[Unit] = []
        if self._current is not None:
            if self._num_steps == 0 and self._has_gradients:
                self._accumulating.append(self._current)
            else:
                closed.append(self._current)
        self._current, self._num_steps, self._has_gradients = None, 0, False
        return closed

    def end(self) -> list[Unit]:
        """The loop is over: gradients that nobody stepped are dropped. Returns the units they came from."""
        closed = self.leave()
        dropped = self._accumulating
        self._accumulating = []
        return dropped + closed

    def backward(self) -> None:
        """A gradient was computed."""
        self._has_gradients = True

    def step(self) -> Update:
        """The identity of the ``optimizer.step()`` that happens now."""
        units = (*self._accumulating, self._current) if self._current is not None else ()
        return Update(units, self._num_steps)

    def stepped(self) -> list[Unit]:
        """The step was accepted. Returns the accumulated units that are complete with it."""
        closed = self._accumulating
        self._accumulating = []
        self._num_steps += 1
        self._has_gradients = False
        return closed

    def abandon(self) -> tuple[Unit, ...]:
        """Forgets every open unit (the job went back to a checkpoint) and returns them."""
        dropped = self.open_units
        self._accumulating, self._current, self._num_steps, self._has_gradients = [], None, 0, False
        return dropped
