"""What parameter servers do for a job besides its steps: evaluation, counting, loading, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader

from stratagem.checkpoint.catalog import is_complete
from stratagem.checkpoint.durable import patiently
from stratagem.cluster.units import Lease, Plan
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import (
    ClusterTimeoutError,
    ConfigurationError,
    PeerUnavailableError,
    StaleStoreError,
    StratagemError,
)
from stratagem.measuring import measures
from stratagem.strategy.ps.units import UnitListener
from stratagem.strategy.ps.variables import RETRY_S, VariableGroups
from stratagem.worker.chief_client import ChiefClient
from stratagem.worker.leases import LeaseClient
from stratagem.worker.push.ps_client import insist
from stratagem.worker.runtime import WorkerRuntime
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)

Meeting = Literal["barrier()", "restore()", "load_once()"]
"""Calls at which all workers meet."""
Place = tuple[int, torch.Size]
"""Address and shape of a tensor; of one without memory (empty, or what stands for a table), the object instead."""


def place_of(tensor: torch.Tensor) -> Place:
    """What tells tensors of a script apart, also by a ``detach()`` of them."""
    return tensor.data_ptr() if tensor.numel() and tensor.device.type != "meta" else id(tensor), tensor.shape


@dataclasses.dataclass(eq=False, repr=False)
class EvaluatedUnits:
    """Evaluation data: units leased from the chief, all evaluated with one version of the weights. Nothing of it is on
    the ps: a unit is accepted when the chief has what was counted on it.

    Implements :class:`stratagem.data.distributed.UnitSource`; each epoch is a pass. The epoch of a unit is the attempt
    of its pass.
    """

    chief: dataclasses.InitVar[ChiefClient]
    group: str
    plan: dataclasses.InitVar[Plan]
    _pull: Callable[[], None]
    _meter: StepMeter

    def __post_init__(self, chief: ChiefClient, plan: Plan) -> None:
        self._client = LeaseClient(chief, plan)
        self.num_passes = 0
        """Passes that were begun; the newest is the ordinal of the topic."""
        self._pulled = 0
        self._begin: Callable[[], None] = lambda: None  # nobody counts
        self._collect: Callable[[], bytes] = bytes

    def counted_by(self, begin: Callable[[], None], collect: Callable[[], bytes]) -> None:
        """Who counts: hears of the beginning of each unit, and says at its end what it has counted."""
        self._begin, self._collect = begin, collect

    def start_epoch(self, epoch: int, stop: int) -> None:
        self.num_passes = epoch + 1
        self._client.start_evaluation(self.group, epoch)
        self._pulled = 0

    def next(self, wait: bool) -> Lease | None:
        if not wait:
            return self._client.next(wait)
        with self._meter.exposed("the other workers to finish the evaluation", phase=measures.MEETING):
            return self._client.next(wait)

    def has_next(self) -> bool:
        return self._client.has_ready

    def holds(self, lease: Lease) -> bool:
        return self._client.holds(lease.unit)

    def begin(self, lease: Lease, batch: Any = None, following: object = None) -> None:
        if self._pulled != self._client.attempt:
            self._pull()
            self._pulled = self._client.attempt
        self._begin()

    def done(self, lease: Lease) -> None:
        if self.holds(lease):
            self._client.count(lease.unit, self._collect())
            self._client.accept(lease.unit)

    def end_epoch(self) -> None:
        """See :class:`~stratagem.data.distributed.UnitSource`."""

    def leave(self) -> None:
        with contextlib.suppress(StratagemError):  # a job that ends has nobody to tell
            self._client.leave()


@dataclasses.dataclass(eq=False, repr=False)
class WholeData:
    """Evaluation data that have no numbers (an iterable): one unit, for one worker."""

    _batches: SplitDataset
    _num_batches: int | None
    """No more than these; None: all."""
    _units: EvaluatedUnits

    def __iter__(self) -> Iterator[Any]:
        self._units.start_epoch(self._units.num_passes, 1)
        try:
            while (lease := self._units.next(wait=True)) is not None:
                self._units.begin(lease)
                with contextlib.closing(iter(self._batches)) as batches:
                    yield from itertools.islice(batches, self._num_batches)
                self._units.done(lease)
        except BaseException:  # also where the script leaves its loop
            self._units.leave()
            raise


@dataclasses.dataclass(eq=False, repr=False)
class Servers:
    """The parameter servers of a job, as its workers' training, evaluation and checkpoints see them."""

    _runtime: WorkerRuntime
    _groups: VariableGroups
    staleness: float
    """Of the job; see ``ParameterServerStrategy``."""
    _device: torch.device
    _pull: Callable[[], None]

    def __post_init__(self) -> None:
        self.chief = self._runtime.chief
        """What workers count and decide together."""
        self.chief.meanwhile = lambda: self._groups.reconnect(only_replaced=True)
        self.listeners: list[UnitListener] = []
        """Who hears of the units that are trained on now."""
        self.num_datasets = 0
        """Distributed so far by the script."""
        self.place = ""
        """Of the script's run, in which evaluations are numbered: one that a worker alone has made, or not made, puts
        none of another place out of order."""

    @contextlib.contextmanager
    def listened(self, listener: UnitListener) -> Iterator[None]:
        """Inside, ``listener`` hears of the units that are trained on."""
        before, self.listeners = self.listeners, [listener]
        try:
            yield
        finally:
            self.listeners = before  # a callback of fit may fit another model

    def lease_evaluation(
        self, loader: DataLoader[Any], num_batches: int | None = None
    ) -> tuple[DistributedDataset, EvaluatedUnits]:
        """Evaluation data of which every example is evaluated by one worker, whatever dies, and all with one version of
        the weights: while a pass goes on, the chief holds training. Every worker has to call it, and to go through it,
        in the same order. Batches of the loader are the units, in the order of the examples, ``num_batches`` at most.
        Gives the batches of this worker, and whom to tell what was counted on them. Raises ConfigurationError: the
        loader's batches have no numbers."""
        whole = plan_of(loader, 1, math.inf)
        wanted = whole.num_examples if num_batches is None else num_batches * whole.batch_size
        plan = dataclasses.replace(whole, num_examples=min(whole.num_examples, wanted), shuffle=False)
        units = self._evaluated_units(plan)
        return DistributedDataset(loader, plan, 0, units, self._device), units

    def lease_whole(self, batches: SplitDataset, num_batches: int | None = None) -> tuple[WholeData, EvaluatedUnits]:
        """As :meth:`lease_evaluation`, of data whose batches have no numbers: one worker evaluates them all."""
        units = self._evaluated_units(Plan(1, 1, shuffle=False))
        return WholeData(batches, num_batches, units), units

    def _evaluated_units(self, plan: Plan) -> EvaluatedUnits:
        group = self.chief.new_group(f"{self.place}evaluation")
        return EvaluatedUnits(self.chief, group, plan, self._pull, self._runtime.meter)

    def beside(self, topic: str, mine: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Tells the other workers what this one was given at a place of its script, and compares it with what they were
        given that came there before: another worker than the lead, what the lead was given, and what that one was.
        Nobody waits. Of processes that have ended, as of an earlier run of the job, nothing counts."""
        me, session = self._runtime.config.task, self._runtime.session
        self.chief.record_logs(f"{topic}, {me}", session.incarnation, {json.dumps(mine): 0.0})
        lead = session.membership.lead
        for each in session.membership.members:
            if not each.live or each.task == me or lead not in (me, each.task) or not each.task.startswith("worker:"):
                continue
            for said in self.chief.logs(f"{topic}, {each.task}", each.incarnation) or ():
                yield (each.task, dict(mine), json.loads(said)) if lead == me else (me, json.loads(said), dict(mine))

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self, directory: pathlib.Path) -> pathlib.Path:
        """Takes a consistent checkpoint of all ps in a directory that all of them see; returns its path. A
        CheckpointError where it could not be written."""
        return pathlib.Path(self.chief.save_checkpoint(str(directory.absolute())))

    def claim(self, target: pathlib.Path) -> bool:
        """Says that this worker saves there. False when another worker, or an earlier job, has done so. Raises
        UnreadableError: nobody can tell, after ten seconds."""
        topic = f"checkpoint {target}"
        # Looked at first: whoever writes it says so before.
        if not patiently(lambda: is_complete(target, is_certain=True)):
            self.chief.record_logs(topic, 0, {})
            return True
        if self.chief.logs(topic, 0) is None:
            logger.warning(
                "%s belongs to an earlier job and is left as it is: nothing is saved. Resume from it "
                "(restore_or_initialize), or save into another directory",
                target,
            )
        return False

    def names(self) -> dict[Place, str]:
        """Names of tables and of the variables that optimizers change on the ps, by :func:`place_of` the copy in this
        process, or of what stands for a table.

        Of what no optimizer changes (buffers) the ps have the initial values only.
        """
        return {place_of(tensor): name for name, tensor in self._groups.optimized}

    def check(self, modules: Iterable[torch.nn.Module]) -> None:
        """Raises ConfigurationError where a script has changed weights of ``modules`` here that the ps hold."""
        self._groups.check([parameter for module in modules for parameter in module.parameters()])

    def has_begun(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the ps have a state of a prepared optimizer: that of updates, or one that they were given."""
        (push,) = (push for push in self._groups.pushes if push.optimizer is optimizer)
        return insist(push.has_begun, self._groups.reconnect)

    @property
    def table_names(self) -> frozenset[str]:
        """Names of the tables, whose rows no worker keeps."""
        return self._groups.table_names

    def load_once(
        self,
        load: Callable[[], object] | None,
        num_updates: int | None = None,
        resumes: bool = False,
        call: Meeting = "restore()",
    ) -> None:
        """See :meth:`.Strategy.load_once`; ``load`` is called on every worker.

        Nobody comes back before the ps have it, so that no update is overwritten. A worker that starts again later
        finds that it is done: its own copy follows what the job has by now.

        Workers leave by what they agreed on, never by what one of them sees: that may be new to one and old to another.
        A chief with a checkpoint directory has taken a checkpoint by then: a ps that is lost comes back with what was
        loaded.

        Args:
            load: gives objects the states that were read, or changes weights in place; once more where a ps is lost
                meanwhile. None: there is nothing to load, which a worker that starts again later, and may find
                something by then, has to know.
            num_updates: of parameter servers, in what is loaded; None: there were none, or nobody knows.
            resumes: ps that have more updates, before the first one of this job, keep what they have: the chief has
                counted the examples of these, and they do not come again.
            call: what the script called.

        Raises:
            ConfigurationError: a script has changed weights here otherwise before, or loads on another worker where
                this one calls ``barrier()``.
        """
        if load is not None:
            self._groups.check()
        group = self.chief.new_group("barrier, load or restore")
        has_loaded = False
        is_late = call == "barrier()" and self.chief.logs(group, 0) is not None  # the others have passed it
        calls = get_args(Meeting)
        met = calls[self.chief.agree(group, 0, calls.index(call))]  # all are here: none has an update under way
        if call == "barrier()" != met and not is_late:
            raise ConfigurationError(
                f"this worker calls barrier() where another one calls {met}: every worker has to make the same of "
                "these calls, in the same order (no `if` around one that is true only on some workers)"
            )
        deadline = time.monotonic() + self._runtime.config.start_timeout_s
        for attempt in itertools.count(1):
            is_done = self.chief.logs(group, 0) is not None
            if not is_done and self._runtime.gives_values():
                keeps = resumes and self._keeps_more_than(num_updates)
                if load is not None and not keeps:
                    self._warn_of_undone(num_updates)
                    self._load(load, deadline)
                self.chief.record_logs(group, 0, {})
                is_done, has_loaded = True, not keeps
            if self.chief.agree(group, attempt, int(is_done)):
                break
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{self._runtime.session.membership.lead} has not loaded what this worker loads: every worker must "
                    "restore, at the same point in the script"
                )
            time.sleep(RETRY_S)
        if not has_loaded:
            if load is not None:
                self._groups.forget()
                with self._runtime.assigning(False):
                    load()
                self._groups.forget()
            self._groups.refresh()
        self.place = f"after {group}, "

    def _keeps_more_than(self, num_updates: int | None) -> bool:
        held = self._groups.num_updates
        if num_updates is None or held <= num_updates or any(push.num_pushed for push in self._groups.pushes):
            return False
        logger.warning(
            "the job continues with %d updates, what was restored has %d: the parameter servers keep their weights and "
            "optimizer state, everything else (counters, schedulers, buffers) is as restored. To undo these updates, "
            "name the checkpoint: Checkpoint.restore(path)",
            *(held, num_updates),
        )
        return True

    def _warn_of_undone(self, num_updates: int | None) -> None:
        held = self._groups.num_updates
        if num_updates is not None and held > num_updates:
            logger.warning(
                "the parameter servers have %d updates, what was restored has %d: they are rolled back to it, and "
                "examples that the chief has counted are not repeated (CheckpointManager.restore_or_initialize at the "
                "start of a job keeps them)",
                *(held, num_updates),
            )
        elif num_updates is not None and held < num_updates:
            logger.info(
                "the parameter servers had %d updates, what was restored has %d: what was trained of an unfinished "
                "epoch is repeated; it is not if --checkpoint-dir is the folder that the script saves in",
                *(held, num_updates),
            )
        elif num_updates is None and held and not any(push.num_pushed for push in self._groups.pushes):
            logger.warning(
                "the job continues with %d updates, and what this script loads replaces them; to start from it and "
                "then keep what was trained, load before strategy.prepare, which only sets values that are new",
                held,
            )

    def _load(self, load: Callable[[], object], deadline: float) -> None:
        """Until a checkpoint has what was loaded, on all ps, where one is kept."""
        while True:
            self._groups.refresh()  # what is not loaded stays as the ps have it
            self._groups.forget()
            before = self._groups.store_epochs
            saved: list[int] | None = []
            with contextlib.suppress(PeerUnavailableError, StaleStoreError), self._runtime.assigning(True):
                load()
                if not self._groups.num_groups:
                    return  # the ps get it with what is prepared later
                self._groups.push()
                saved = self.chief.save_loaded()
            if saved is None or saved == before:
                return
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"parameter servers were lost while {self._runtime.session.task} loaded, again and again; look at "
                    "their logs"
                )
            time.sleep(RETRY_S)
            self._groups.forget()
            self._groups.reconnect()
