"""What a parameter server holds, and within which limits. Pure; checked before any allocation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import LimitError, VariableError
from stratagem.ps import optimizers
from stratagem.rpc.codec import MAX_RANK

_SPARE_BYTES = 64 << 20


def of_another_model(what: str) -> VariableError:
    """The error to raise where the models of two workers, or of a worker and a checkpoint, differ in ``what``."""
    return VariableError(
        f"{what}. Every worker must build the same model with the same partitioner, as in the run that made the "
        "values; another model begins in a checkpoint directory of its own, with what it takes of sg.load_checkpoint "
        "before prepare"
    )


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """Contiguous rows of one variable inside a shard group."""

    variable: str
    """Name, unique in the job."""
    shape: tuple[int, ...]
    """Shape of the whole variable."""
    first_row: int
    """First row held here; 0 for a rank-0 variable."""
    num_rows: int
    """Rows held here; 1 for a rank-0 variable."""
    offset: int
    """First element in the group's flat tensor."""
    param_group: int = 0
    rows: InitialRows | None = dataclasses.field(default=None, compare=False)
    """Set for a table, whose gradients come by row; whoever attaches may have drawn another seed."""

    @functools.cached_property
    def num_elements(self) -> int:
        return self.num_rows * math.prod(self.shape[1:])

    @functools.cached_property
    def stop(self) -> int:
        """One past the last element in the group's flat tensor."""
        return self.offset + self.num_elements

    @property
    def is_whole(self) -> bool:
        """Whether every row of the variable is held here."""
        return self.num_rows == (self.shape[0] if self.shape else 1)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.shape[1:]) if self.shape else ()

    @property
    def key(self) -> str:
        """Name in a checkpoint file: the variable's own, or ``name@first_row`` for a row shard."""
        return self.variable if self.is_whole else f"{self.variable}@{self.first_row}"


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Shards of one optimizer and one dtype that live in one flat tensor."""

    group: int
    """Identity in the job."""
    optimizer: str
    """Name of the torch.optim class; empty for values that no optimizer changes."""
    dtype: torch.dtype
    shards: tuple[ShardSpec, ...]
    """In the order of the flat tensor."""

    @functools.cached_property
    def is_table(self) -> bool:
        """Whether it consists of tables, whose rows travel by number."""
        return any(shard.rows is not None for shard in self.shards)

    @functools.cached_property
    def made(self) -> tuple[ShardSpec, ...]:
        """Of tables: those whose initial rows are made here."""
        return tuple(shard for shard in self.shards if shard.rows and shard.rows.distribution != "assigned")

    @functools.cached_property
    def row_ends(self) -> npt.NDArray[np.int64]:
        """Of tables: for each shard one past the number of its last row here."""
        return np.array([shard.stop // self.row_elements for shard in self.shards], dtype=np.int64)

    @functools.cached_property
    def max_slots(self) -> int:
        """Largest number of slots that its optimizer may keep."""
        return len(optimizers.rule_for(self.optimizer, self.is_table).possible_slots) if self.optimizer else 0

    def holders(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Of tables: for each of some row numbers the position of its shard."""
        return np.searchsorted(self.row_ends, numbers, side="right")

    @functools.cached_property
    def num_rows(self) -> int:
        """Of tables: rows held here."""
        return sum(shard.num_rows for shard in self.shards)

    @functools.cached_property
    def row_elements(self) -> int:
        """Of tables: elements of a row."""
        return math.prod(self.shards[0].shape[1:]) if self.shards else 0

    @functools.cached_property
    def num_param_groups(self) -> int:
        """Param_groups of the optimizer that there must be at least."""
        return max((shard.param_group for shard in self.shards), default=0) + 1

    @functools.cached_property
    def num_elements(self) -> int:
        return self.shards[-1].stop if self.shards else 0

    @functools.cached_property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a parameter server refuses to exceed."""

    max_variables: int = 100_000
    """Shards held."""
    max_store_bytes: int = 1 << 40
    """Bytes of variables and of the largest set of slots that their optimizers may keep."""
    max_peer_bytes: int = 0
    """Bytes staged by one incarnation, and as many that wait for it unread; 0: see :meth:`peer_bytes`."""
    max_peers: int = 4096
    """Incarnations remembered."""
    max_request_bytes: int = 64 << 20
    """A request that comes over a lane."""
    max_ids_per_request: int = 1 << 20
    """Entries of all its lists."""

    def peer_bytes(self, held_bytes: int) -> int:
        """``max_peer_bytes``, or what several copies of all that is held take (``held_bytes``: variables and slots)."""
        return self.max_peer_bytes or _SPARE_BYTES + 4 * held_bytes


def check_group(spec: GroupSpec) -> None:
    """Refuses a group that cannot be. VariableError: impossible rows, offsets, names or dtype; names the variable.
    UnsupportedOptimizerError: an optimizer that a ps cannot run."""
    if spec.optimizer:
        optimizers.rule_for(spec.optimizer, spec.is_table)
        if not spec.dtype.is_floating_point:
            raise VariableError(f"group {spec.group}: expected a floating dtype for {spec.optimizer}, got {spec.dtype}")
    offset = 0
    for shard in spec.shards:
        rows = shard.shape[0] if shard.shape else 1
        if not shard.variable or len(shard.shape) > MAX_RANK:
            raise VariableError(
                f"variable {shard.variable!r}: expected a name and at most {MAX_RANK} dimensions, "
                f"got {len(shard.shape)}"
            )
        if shard.first_row + shard.num_rows > rows:
            raise VariableError(
                f"variable {shard.variable}: expected rows within {rows} of shape {list(shard.shape)}, "
                f"got rows {shard.first_row} to {shard.first_row + shard.num_rows}"
            )
        if shard.offset != offset:
            raise VariableError(f"variable {shard.variable}: expected offset {offset}, got {shard.offset}")
        offset = shard.stop
    if spec.is_table:
        _check_tables(spec)


def _check_tables(spec: GroupSpec) -> None:
    kinds = {(shard.rows is None, shard.shape[1:], shard.param_group) for shard in spec.shards}
    if len(kinds) != 1 or len(spec.shards[0].shape) != 2 or not spec.row_elements or not spec.num_rows:
        raise VariableError(
            f"group {spec.group}: expected rows of tables of two dimensions, one width and one param_group, got "
            f"{len(spec.shards)} shards of {len(kinds)} kinds"
        )
    if not spec.dtype.is_floating_point:
        raise VariableError(f"table {spec.shards[0].variable}: expected a floating dtype, got {spec.dtype}")
    for shard in spec.shards:
        assert shard.rows is not None
        if not (math.isfinite(shard.rows.first) and math.isfinite(shard.rows.second)):
            raise VariableError(f"table {shard.variable}: expected finite initial values")


def check_new_groups(
    new: Sequence[GroupSpec], held: Sequence[GroupSpec], limits: Limits, elsewhere: Sequence[GroupSpec] = ()
) -> None:
    """Refuses groups that clash with each other, with those held or those of other ps, or that are over a limit.
    VariableError: a variable's rows come twice, or with two shapes. LimitError: over ``limits``; names the limit."""
    every = [*held, *new]
    num_shards = sum(len(spec.shards) for spec in every)
    if num_shards > limits.max_variables:
        raise LimitError(
            f"{num_shards} shards are over max_variables of this parameter server, {limits.max_variables}; "
            "use more parameter servers or raise it"
        )
    num_bytes = sum(spec.num_bytes * (1 + spec.max_slots) for spec in every)
    if num_bytes > limits.max_store_bytes:
        raise LimitError(
            f"{num_bytes:,} bytes of variables and slots are over max_store_bytes of this parameter server, "
            f"{limits.max_store_bytes:,} (if nobody set it: the memory that was free when it started). Use more "
            "parameter servers, on more machines where memory is what is short, or raise it"
        )
    rows: dict[str, list[ShardSpec]] = {}
    for shard in (shard for spec in (*elsewhere, *every) for shard in spec.shards):
        for other in rows.setdefault(shard.variable, []):
            if other.shape != shard.shape:
                raise of_another_model(
                    f"variable {shard.variable}: expected shape {list(other.shape)}, got {list(shard.shape)}"
                )
            if (
                shard.first_row < other.first_row + other.num_rows
                and other.first_row < shard.first_row + shard.num_rows
            ):
                raise of_another_model(f"variable {shard.variable}: row {shard.first_row} is placed twice")
        rows[shard.variable].append(shard)


def check_same(held: GroupSpec, came: GroupSpec) -> None:
    """Raises ``VariableError``, which names the variable, what is held and what came, where these are not the same."""
    if held == came and held.is_table == came.is_table:
        return
    for attribute in ("optimizer", "dtype", "is_table"):
        expected, got = getattr(held, attribute), getattr(came, attribute)
        if expected != got:
            raise of_another_model(
                f"group {held.group}: expected {attribute} {expected or 'none'}, got {got or 'none'}"
            )
    by_key = {(shard.variable, shard.first_row): shard for shard in held.shards}
    for shard in came.shards:
        other = by_key.get((shard.variable, shard.first_row))
        if other is None:
            raise of_another_model(
                f"group {held.group}: rows {shard.first_row} and on of variable {shard.variable} are not held here"
            )
        if other != shard:
            raise of_another_model(f"variable {shard.variable}: expected {_describe(other)}, got {_describe(shard)}")
    missing = next(shard for shard in held.shards if shard not in came.shards)
    raise of_another_model(f"group {held.group}: expected variable {missing.variable} too, it did not come")


def _describe(shard: ShardSpec) -> str:
    rows = f"rows {shard.first_row}..{shard.first_row + shard.num_rows}"
    return f"shape {list(shard.shape)}, {rows}, offset {shard.offset}, param_group {shard.param_group}"
