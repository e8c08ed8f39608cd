"""The columns of the matrix: every strategy in every form that behaves in a way of its own, as rows of data."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import stratagem as sg

HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None


@dataclasses.dataclass(frozen=True)
class Column:
    """One strategy, and how its script is run."""

    name: str
    """In test ids."""
    title: str
    """In the table."""
    build: Callable[[], sg.Strategy] | None = None
    """Makes the strategy in the process of the tests; None: a script is started by ``stratagem run`` or
    torch_xla."""
    flags: tuple[str, ...] = ()
    """Of ``stratagem run``."""
    num_workers: int = 1
    """How many times the script runs: the length of ``results``."""
    num_local: int = 1
    """Replicas of each worker."""
    num_ps: int = 0
    num_replicas: int = 1
    """In sync."""

    num_xla_devices: int = 0
    """Of torch_xla, on the CPU; one: by its launcher, several: by SPMD. 0: nothing of torch_xla."""
    is_thorough: bool = False
    """`make test` leaves it out: others together show most of it."""

    @property
    def is_here(self) -> bool:
        """Whether this environment can run it: that of `make test-xla` has torch_xla, and runs nothing else."""
        return bool(self.num_xla_devices) == HAS_TORCH_XLA


ONE = Column("one", "one", lambda: sg.OneDeviceStrategy("cpu"))
MIRRORED_2 = Column(
    "mirrored-2", "mirrored, 2", lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), num_local=2, num_replicas=2
)
MIRRORED_3 = Column(
    "mirrored-3",
    "mirrored, 3, hierarchical",
    lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], sg.HierarchicalCopyAllReduce()),
    num_local=3,
    num_replicas=3,
    is_thorough=True,
)
CENTRAL_2 = Column(
    "central-2",
    "central, 2",
    lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    num_local=2,
    num_replicas=2,
    is_thorough=True,
)
RING_2 = Column("ring-2", "ring, 2", flags=("--strategy", "ring"), num_workers=2, num_replicas=2)
RING_2X2 = Column(
    "ring-2x2",
    "ring, 2 × 2",
    flags=("--strategy", "ring", "--devices", "cpu:0,cpu:1"),
    num_workers=2,
    num_local=2,
    num_replicas=4,
    is_thorough=True,
)
PS_SYNC = Column("ps-sync", "ps, staleness 0", flags=("--staleness", "0"), num_workers=2, num_ps=2, num_replicas=2)
PS_ASYNC = Column("ps-async", "ps, asynchronous", num_workers=2, num_ps=1)
TPU = tuple(Column(f"xla-{number}", f"tpu, {number}", num_xla_devices=number) for number in (1, 2, 4))

COLUMNS = (ONE, MIRRORED_2, MIRRORED_3, CENTRAL_2, RING_2, RING_2X2, PS_SYNC, PS_ASYNC, *TPU)
"""In the order of the table."""

IN_ONE_PROCESS = (ONE, *TPU)
"""Those with one replica in sync that has all of a batch."""
SEVERAL_LOCAL = tuple(column for column in COLUMNS if column.num_local > 1)
PARAMETER_SERVERS = (PS_SYNC, PS_ASYNC)
SYNCHRONOUS = tuple(column for column in COLUMNS if column is not PS_ASYNC)
"""Their numbers are those of one process on the same global batches."""
