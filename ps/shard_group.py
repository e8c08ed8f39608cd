"""One flat tensor of weights, its flat optimizer slots, and the update that changes both in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import ProtocolError, VariableError
from stratagem.ps import optimizers
from stratagem.ps.runs import Run, cut_runs
from stratagem.ps.specs import GroupSpec

Parts = Sequence[tuple[int, torch.Tensor]]
"""Pieces of a flat tensor: first element, and a 1-D tensor that may be a view on a received message."""


@dataclasses.dataclass
class _Plan:
    """A torch optimizer over views of the flat tensors, for one arrangement of the pieces."""

    key: tuple[Any, ...]
    runs: tuple[Run, ...]
    parameters: list[torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    step: Callable[[], object] | None
    """Of the optimizer."""
    param_groups: list[tuple[int, bool]]
    """For each group of the torch optimizer: index of the script's param_group, and whether it is a first update."""
    after: bool = False
    """Whether a later update may reuse it."""


class ShardGroup:
    """Weights and optimizer state of one group on this ps. Not thread-safe."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.weights = torch.zeros(spec.num_elements, dtype=spec.dtype)
        self.slots: dict[str, torch.Tensor] = {}
        """Flat slots by name, each like ``weights``; they appear with the first update that needs them."""
        self.counts = [0] * len(spec.shards)
        """Updates each shard has seen."""
        self.scalars: dict[str, list[float]] = {}
        """Numbers the optimizer keeps for each shard."""
        self.started = [False] * len(spec.shards)
        """Whether each shard's momentum buffer holds anything yet."""
        self.counter = 0
        """Grows with every change of the weights."""
        self.num_updates = self.num_skipped = 0
        self.initialized = not spec.shards
        self._rule = optimizers.rule_for(spec.optimizer, spec.is_table) if spec.optimizer else None
        self._came: tuple[Mapping[str, Any], ...] = ()
        self._hyper: tuple[dict[str, Any], ...] = ()
        self._plan: _Plan | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and slots."""
        return self.spec.num_bytes * (1 + len(self.slots))

    def prepare(self, parts: Parts, present: Sequence[bool], hyper_parameters: Sequence[Mapping[str, Any]]) -> None:
        """Makes everything ready for :meth:`apply` with pieces that lie like these; changes no weight. ProtocolError:
        pieces overlap or do not cover what is present; hyper-parameters are missing. ConfigurationError: torch refuses
        the hyper-parameters. VariableError: the group has no optimizer."""
        has_other_hyper = self._set_hyper_parameters(hyper_parameters)
        extents = tuple([(offset, piece.numel()) for offset, piece in parts])
        key = (extents, tuple(present))
        if self._plan is None or self._plan.key != key or not self._plan.after:
            self._plan = None
            self._allocate(present)
            self._plan = self._build(key, cut_runs(extents, self.spec.shards, present, self._likeness()))
            self._refresh(self._plan)
        elif has_other_hyper:
            self._refresh(self._plan)

    def apply(self, parts: Parts, present: Sequence[bool], scale: float = 1.0) -> None:
        """One optimizer update, in place, which was prepared: all groups of an update prepare before any applies.

        The gradient is ``parts``, 1-D pieces of the group's dtype, read where they are, neither copied nor written,
        times ``scale``: anything but 1 costs a pass. Shards without one (``present``) keep their weights, slots and
        step counts.
        """
        plan = self._plan
        assert plan is not None and self._rule is not None
        for parameter, run in zip(plan.parameters, plan.runs, strict=True):
            offset, piece = parts[run.piece]
            is_whole = run.start == offset and run.stop == offset + piece.numel()
            gradient = piece if is_whole else piece[run.start - offset : run.stop - offset]
            parameter.grad = gradient if scale == 1.0 else gradient * scale
        if plan.step is not None:
            plan.step()
        for parameter in plan.parameters:
            parameter.grad = None  # the message it points into can go
        self._advance(plan, present)

    def check_first_values(self, parts: Parts) -> None:
        """Raises ``ProtocolError`` for values that the group cannot begin with: they overlap, or do not cover it."""
        shards = self.spec.shards
        cut_runs([(offset, piece.numel()) for offset, piece in parts], shards, [True] * len(shards), [0] * len(shards))

    def take_first_values(self, parts: Parts) -> None:
        """Values that were checked are in the weights."""
        self.initialized = True

    def counts_with(self, came: Sequence[int], parts: Parts) -> Sequence[int]:
        """Step counts of all shards, as they came with values of all."""
        return came

    def touch(self) -> None:
        """The weights were changed from outside."""
        self.counter += 1
        self._plan = None

    def slot(self, name: str) -> torch.Tensor:
        """The flat slot ``name``, made if the optimizer can have it. VariableError: the optimizer keeps no such
        slot."""
        if name not in self.slots:
            possible = self._rule.possible_slots if self._rule is not None else ()
            if name not in possible:
                known = ", ".join(possible) or "none"
                raise VariableError(
                    f"group {self.spec.group}: {self.spec.optimizer or 'no optimizer'} keeps no slot {name!r}; "
                    f"it keeps {known}"
                )
            self.slots[name] = torch.zeros_like(self.weights)
            self._plan = None
        return self.slots[name]

    @property
    def counts_steps(self) -> bool:
        """Whether torch's optimizer keeps the number of steps with its state, as all but SGD do."""
        return self._rule is not None and self._rule.counts_steps

    def set_progress(self, counts: Sequence[int], scalars: Mapping[str, Sequence[float]]) -> None:
        """Replaces step counts and scalars, as after loading a state dict. A scalar "step" is what ``counts`` says.
        ProtocolError: not one value per shard, or a scalar the optimizer does not keep."""
        known = [*self._rule.scalars, *(["step"] if self.counts_steps else [])] if self._rule is not None else []
        if counts and len(counts) != len(self.counts):
            raise ProtocolError(
                f"expected {len(self.counts)} step counts for group {self.spec.group}, got {len(counts)}"
            )
        for name, values in scalars.items():
            if name not in known or len(values) != len(self.counts):
                raise ProtocolError(
                    f"group {self.spec.group}: expected {len(self.counts)} values of "
                    f"{', '.join(known) or 'no scalars'}, got {len(values)} of {name!r}"
                )
        if counts:
            self.counts = list(counts)
        self.scalars.update({name: list(values) for name, values in scalars.items() if name != "step"})
        self._plan = None
        name = self._rule.first_slot if self._rule is not None else ""
        if name in self.slots:
            flat = self.slots[name]
            for index, shard in enumerate(self.spec.shards):
                self.started[index] = bool(self.counts[index]) or bool(flat[shard.offset : shard.stop].any())

    def _set_hyper_parameters(self, came: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether they are others than those of the update before."""
        if self._rule is None:
            raise VariableError(f"group {self.spec.group} has no optimizer; assign its values instead")
        needed = self.spec.num_param_groups
        if len(came) < needed:
            raise ProtocolError(
                f"group {self.spec.group}: expected hyper-parameters of {needed} param_groups, got {len(came)}"
            )
        is_new = tuple(came) != self._came
        if is_new:
            hyper = tuple([optimizers.effective(self._rule, group) for group in came])
            if [self._rule.slots(new) for new in hyper] != [self._rule.slots(old) for old in self._hyper]:
                self._plan = None
            self._came, self._hyper = tuple(dict(group) for group in came), hyper
        return is_new

    def _likeness(self) -> list[Hashable]:
        """What shards must share to be updated together."""
        return [
            (shard.param_group, self.counts[i], self._first(i), *(values[i] for values in self.scalars.values()))
            for i, shard in enumerate(self.spec.shards)
        ]

    def _first(self, index: int) -> bool:
        """Whether shard ``index`` must see the first-update overrides."""
        assert self._rule is not None
        hyper = self._hyper[self.spec.shards[index].param_group]
        needed = bool(self._rule.first_slot) and self._rule.first_slot in self._rule.slots(hyper)
        return needed and not self.started[index]

    def _allocate(self, present: Sequence[bool]) -> None:
        """Makes the slots and scalars that this update needs, with first values for shards that begin."""
        rule = self._rule
        assert rule is not None
        for index, shard in enumerate(self.spec.shards):
            if not present[index]:
                continue
            hyper = self._hyper[shard.param_group]
            for name in rule.slots(hyper):
                flat = self.slot(name)
                if not self.counts[index] and name in rule.first_values:
                    flat[shard.offset : shard.stop].fill_(rule.first_values[name](hyper))
            for name, first_value in rule.scalars.items():
                values = self.scalars.setdefault(name, [0.0] * len(self.counts))
                if not self.counts[index]:
                    values[index] = first_value(hyper)

    def _build(self, key: tuple[Any, ...], runs: tuple[Run, ...]) -> _Plan:
        rule = self._rule
        assert rule is not None
        kinds = [(self.spec.shards[run.shard].param_group, self._first(run.shard)) for run in runs]
        order = sorted(set(kinds))
        parameters = [self.weights[run.start : run.stop] for run in runs]
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for run, (param_group, _), parameter in zip(runs, kinds, parameters, strict=True):
            kept = {name: self.slots[name][run.start : run.stop] for name in rule.slots(self._hyper[param_group])}
            if rule.counts_steps:
                kept["step"] = torch.zeros(())
            kept |= {name: torch.zeros(()) for name in rule.scalars}
            state[parameter] = kept
        groups = [
            (
                self._kind_hyper(kind),
                [parameter for parameter, other in zip(parameters, kinds, strict=True) if other == kind],
            )
            for kind in order
        ]
        optimizer = optimizers.build(rule, groups, state, self.spec.dtype) if groups else None
        step = optimizers.bare_step(optimizer) if optimizer is not None else None
        return _Plan(key, runs, parameters, optimizer, step, order)

    def _kind_hyper(self, kind: tuple[int, bool]) -> dict[str, Any]:
        assert self._rule is not None
        param_group, is_first = kind
        return self._hyper[param_group] | (dict(self._rule.first_overrides) if is_first else {})

    def _refresh(self, plan: _Plan) -> None:
        """Brings hyper-parameters, and after a rebuild counts and scalars, up to date."""
        if plan.optimizer is None or self._rule is None:
            return
        for target, kind in zip(plan.optimizer.param_groups, plan.param_groups, strict=True):
            target.update(self._kind_hyper(kind))
        if plan.after:
            return
        for run, parameter in zip(plan.runs, plan.parameters, strict=True):
            kept = plan.optimizer.state[parameter]
            if self._rule.counts_steps:
                kept["step"].fill_(self.counts[run.shard])
            for name in self._rule.scalars:
                kept[name].fill_(self.scalars[name][run.shard])

    def _advance(self, plan: _Plan, present: Sequence[bool]) -> None:
        assert self._rule is not None
        had_firsts = any(is_first for _, is_first in plan.param_groups)
        shards = self.spec.shards
        if self._rule.scalars and plan.optimizer is not None:
            for run, parameter in zip(plan.runs, plan.parameters, strict=True):
                kept = plan.optimizer.state[parameter]
                index = run.shard
                while index < len(shards) and shards[index].offset < run.stop:
                    for name in self._rule.scalars:
                        self.scalars[name][index] = float(kept[name])
                    index += 1
        if had_firsts:
            for index, has_gradient in enumerate(present):
                self.started[index] = self.started[index] or (has_gradient and self._first(index))
        self.counts = [count + has_gradient for count, has_gradient in zip(self.counts, present, strict=True)]
        plan.after = not had_firsts
        self.counter += 1
        self.num_updates += 1
