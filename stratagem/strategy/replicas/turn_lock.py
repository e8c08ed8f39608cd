"""Whose turn it is among replicas that share the CPU, and which random numbers each of them draws."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from stratagem.strategy.replicas.wake_ups import SelectiveCondition

CALLER = -1
"""Stands for the thread that lets the replicas run; it has the turn when none of them does."""


class TurnLock:
    """One of several threads has it; each finds torch's CPU generator as it left it, whoever drew in between.

    The caller and replica 0 draw from one stream: what replica 0 draws moves the caller's generator on, as a step of
    one process does. The streams of the others are seeded from the state of the caller's generator, again whenever the
    caller has seeded or used it between two runs. So ``torch.manual_seed`` before a run determines all of them.
    ``changed`` guards the turn, and wakes those who wait for it; for all but the ``takers`` every call does nothing.
    """

    def __init__(self, changed: SelectiveCondition, takers: Collection[int]) -> None:
        self._changed = changed
        self._takers = frozenset({CALLER, *takers} if takers else ())
        self._holder: int | None = CALLER
        self._wanting = set[int]()
        self._states: dict[int, torch.Tensor] = {}
        self._stream = 0
        """Whose stream is in the generator now."""
        self._left: torch.Tensor | None = None
        """The generator as it was when the caller got the turn back."""

    def start(self) -> None:
        """The caller leases it to the replicas, for a run."""
        if not self._takers:
            return
        now = torch.get_rng_state()
        if self._left is None or not torch.equal(now, self._left):
            self._seed(now)
        self.pass_on()

    def pass_on(self) -> None:
        """The caller gives it to the first replica; all will want it, in their order."""
        with self._changed:
            self._wanting |= self._takers - {CALLER}
            self.release(CALLER)

    def finish(self) -> None:
        """The caller takes it back, when no replica runs any more."""
        if not self._takers:
            return
        with self._changed:
            self.take(CALLER)
        self._left = torch.get_rng_state()

    def take(self, who: int) -> None:
        """Returns when nobody else has it. The lowest of those who want it comes first."""
        if who not in self._takers:
            return
        with self._changed:
            self._wanting.add(who)
            try:
                self._changed.wait_for(
                    lambda: self._holder == who or (self._holder is None and min(self._wanting) == who)
                )
                self._holder = who
            finally:
                self._wanting.discard(who)
                self._changed.notify_all()
            if (stream := max(who, 0)) != self._stream:
                self._states[self._stream] = torch.get_rng_state()
                torch.set_rng_state(self._states[stream])
                self._stream = stream

    def release(self, who: int) -> None:
        """Lets the next one have it, if ``who`` has it."""
        with self._changed:
            if self._holder == who:
                self._holder = None
                self._changed.notify_all()

    def states(self) -> dict[str, torch.Tensor]:
        """The streams of all but the caller and replica 0, by the replica's number; the caller has the turn.

        "left": the generator as the caller got it back, by which it is told whether the caller has used it since.
        """
        if self._left is None:
            return {}
        own = {str(who): state.clone() for who, state in self._states.items() if who > 0}
        return own | {"left": self._left.clone()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Takes what :meth:`states` gave. That of other replicas than these: they are seeded when they run next."""
        self._left = None
        if set(states) == {"left", *(str(who) for who in self._takers if who > 0)}:
            self._states |= {who: states[str(who)].clone() for who in self._takers if who > 0}
            self._left = states["left"].clone()

    def _seed(self, state: torch.Tensor) -> None:
        generator = torch.Generator("cpu")
        generator.set_state(state)
        first = int(torch.randint(1 << 62, (), generator=generator, device="cpu"))
        for who in self._takers - {CALLER, 0}:
            self._states[who] = torch.Generator("cpu").manual_seed(first + who).get_state()
