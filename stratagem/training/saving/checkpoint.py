"""``sg.Checkpoint``: the state of a training script on disk, and back."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, overload

import torch

from stratagem.arguments import checked, whole_numbers
from stratagem.checkpoint import reading
from stratagem.checkpoint.catalog import check, choose, is_folder, offer, remove, scan, steps
from stratagem.checkpoint.draft import CheckpointDraft, remove_unfinished
from stratagem.checkpoint.durable import patiently, write_durably
from stratagem.checkpoint.manifest import Manifest
from stratagem.checkpoint.server_state import ServerState
from stratagem.checkpoint.tensor_file import add_tensors
from stratagem.checkpoint.tree import EncodedState, encode
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.measuring import measures
from stratagem.rpc.heap import give_back_freed_memory
from stratagem.strategy.base import Strategy
from stratagem.strategy.current import current_strategy
from stratagem.strategy.metric_states import States, states_of_all
from stratagem.strategy.ps.servers import Servers
from stratagem.strategy.random_states import all_random_states, have_seed_of_process, set_all_random_states
from stratagem.tensorflow_names import WithWaysOut, no_attribute
from stratagem.training.saving.members import CheckpointMembers, FirstLostError
from stratagem.training.saving.object_states import (
    beyond_variables,
    kind_of,
    put_back,
    states_of_variables,
    tables_of,
    take,
)
from stratagem.worker import background_writes
from stratagem.worker.runtime import active_runtime
from stratagem.worker.step_meter import timed_phase

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 2 << 30
RANDOM = "_random"


@dataclasses.dataclass(frozen=True)
class Restored(WithWaysOut):
    """What :meth:`Checkpoint.restore` found."""

    path: str
    """Folder of the checkpoint."""
    step: int
    """Its number."""


@checked
class Checkpoint:
    """Saves objects together and restores them, under any strategy and across strategies.

    ``sg.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, data=dataset, epoch=0)`` takes models,
    optimizers, ``sg.Variable``, any object with ``state_dict()`` and ``load_state_dict()``, and numbers and strings,
    which become attributes (``checkpoint.epoch += 1``). It also saves random number generators. Nothing is pickled.

    Under a synchronous strategy with several workers every worker calls every method; rank 0 writes and reads the
    files, all get the path and the states. Buffers that differ between replicas are averaged. On parameter
    servers one worker is enough to save: it asks the chief for a consistent checkpoint of all ps, and adds
    what the ps do not hold. If several save the same step, the first one wins; all get its path. Every worker
    restores; the ps get the states once, from the lead, before any worker continues. A worker that restarts in a
    running job restores only what it alone holds; the weights and slots keep their current values.

    A directory is a checkpoint once it is complete: a save that dies, or finds the disk full, leaves the earlier ones
    unchanged. An existing checkpoint is never overwritten.

    Args:
        model: positional, as in TensorFlow: short for ``model=model``.
        strategy: None: that of the open scope.
        asynchronous: :meth:`save` returns once the states are copied, and writes in the background. Only one write runs
            at a time, so a save waits for the one before it, and so does :meth:`wait`.
        max_file_bytes: size at which a file is full and the next begins.
        objects: by name.

    Raises:
        ConfigurationError: an object cannot be saved, or this worker of a cluster does not name its strategy.
    """

    def __init__(
        self,
        model: Any = None,
        /,
        *,
        strategy: Strategy | None = None,
        asynchronous: bool = False,
        max_file_bytes: int = MAX_FILE_BYTES,
        **objects: Any,
    ) -> None:
        if model is not None:
            if "model" in objects:
                raise ConfigurationError("a model given by position is called 'model': name the other one differently")
            objects["model"] = model
        for name, item in objects.items():
            _check_name(name, item)
        chosen = strategy or current_strategy()
        if not chosen.places_models and active_runtime() is not None:
            raise ConfigurationError(
                "this worker belongs to a cluster: build the Checkpoint inside `with strategy.scope():`, or pass "
                "strategy=, so that all workers save one checkpoint together"
            )
        self._objects = objects
        self._added: set[str] = set()
        """Objects that a checkpoint may lack."""
        self._strategy = chosen
        self._asynchronous = asynchronous
        self._max_file_bytes = max_file_bytes
        self._members = CheckpointMembers(chosen.communicator)
        self._servers = chosen.servers
        self._writing: Future[None] | None = None
        self._is_pending = False
        self._first = ""  # who writes, in a ring that may lose it
        self._stall_s = 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._objects:
            raise no_attribute("this checkpoint", name, "Checkpoint")
        return self._objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            if name not in self._objects:
                raise AttributeError(f"this checkpoint has no {name!r}; name its objects when you create it")
            kind_of(name, value)
            self._objects[name] = value
        else:
            super().__setattr__(name, value)

    def add(self, name: str, item: Any) -> None:
        """Saves one more object, unless there is one of this name. A checkpoint without it restores the others.

        Raises:
            ConfigurationError: it cannot be saved.
        """
        if name not in self._objects:
            _check_name(name, item)
            self._objects[name] = item
            self._added.add(name)

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas have the objects."""
        return self._strategy

    @property
    def last_stall_s(self) -> float:
        """Seconds for which the last save blocked this process."""
        return self._stall_s

    @checked
    def save(self, prefix: str | os.PathLike[str], *, step: int | None = None, blocking: bool | None = None) -> str:
        """Saves a checkpoint ``<prefix>-00000012`` and returns its path.

        Args:
            prefix: directory and beginning of the name ("runs/a/step"); if it ends in "/" or is an existing directory,
                the name is "step". On parameter servers the directory must be visible to all of them.
            step: its number; None: one more than the highest in the directory. Two workers on parameter servers that
                omit it, and save one after the other, save two.
            blocking: whether to return only when it is complete; None: as set in the constructor.

        Raises:
            CheckpointError: it cannot be written, or the previous asynchronous save could not.
            ConfigurationError: a state cannot be written.
        """
        text = os.fspath(prefix)
        path = pathlib.Path(text)
        is_prefix = not text.endswith("/") and not patiently(lambda: is_folder(path))
        folder, name = (path.parent, path.name) if is_prefix else (path, "step")
        return self._save(folder, name, step, blocking, lambda written: None)

    @checked
    def write(self, folder: str | os.PathLike[str], *, step: int | None = None, blocking: bool | None = None) -> str:
        """Saves the only checkpoint in ``folder``: once it is complete, earlier ones there are removed.

        Use it for a path that a script chooses itself, like "best" or "epoch-3"; :meth:`restore` takes the folder.
        Arguments, result and errors are those of :meth:`save`.
        """
        with timed_phase(measures.SAVE):
            self.wait()
        at = pathlib.Path(folder)
        older = [path for path in scan(at) if path.parent == at]
        return self._save(at, "step", step, blocking, partial(_remove, older))

    def wait(self) -> None:
        """Returns when an asynchronous save is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        writing = self._writing
        if writing is not None and not writing.cancelled():
            writing.exception()  # only what has ended is forgotten: whoever is interrupted here waits again
        is_pending, self._is_pending, self._writing = self._is_pending, False, None
        if writing is not None:
            background_writes.heard(writing)
        if is_pending:
            self._members.from_first(lambda: None if writing is None else writing.result(), self._first)

    @overload
    def restore(self, path: str | os.PathLike[str], *, random: bool = True) -> Restored: ...

    @overload
    def restore(self, path: str | os.PathLike[str] | None, *, random: bool = True) -> Restored | None: ...

    @checked
    def restore(self, path: str | os.PathLike[str] | None, *, random: bool = True) -> Restored | None:
        """Gives every object its saved state.

        Args:
            path: a checkpoint of any strategy and any number of ps and workers; or a directory of checkpoints, for the
                newest complete one; or None, which ``latest_checkpoint`` returns if there is none: then nothing is
                restored, and None returned. Objects that are only in the checkpoint are ignored.
            random: whether to restore the random number generators too. A worker that the saving job did not have keeps
                its own; on parameter servers, so does one whose seed (``torch.manual_seed``) is not the saver's.

        Raises:
            CheckpointError: it is damaged (names the file, and the last good checkpoint), or lacks an object. An
                UnreadableError: its disk did not answer for ten seconds.
        """
        return self._restore(path, random)

    def _restore(
        self, path: str | os.PathLike[str] | None, random: bool = True, resumes: bool = False
    ) -> Restored | None:
        """:meth:`restore`; ``resumes``: parameter servers that a new job has put back to more than that keep it."""
        self.wait()
        found: dict[str, Any] = {}

        def look() -> dict[str, Any]:
            if path is None:
                return {}
            background_writes.settle(pathlib.Path(path))
            target = reading.find(path)
            check(target)
            saved = found["saved"] = reading.describe(target)
            return {"path": str(target), "step": saved.step, "random": random and RANDOM in saved.objects}

        place = self._members.from_first(lambda: patiently(look))
        if not place:
            if self._servers is not None:
                self._servers.load_once(None)
            return None

        def read() -> dict[str, EncodedState]:
            saved = found["saved"]
            lacking = self._added - saved.objects.keys()
            wanted = {name: item for name, item in self._objects.items() if name not in lacking}
            tables = () if self._servers is None else self._servers.table_names | tables_of(wanted, saved)
            if saved.has_servers and not saved.objects:
                try:
                    return states_of_variables(wanted, ServerState(saved.path, tables))
                except CheckpointError as error:
                    raise CheckpointError(f"cannot restore {saved.path}: {error}. {offer(saved.path)}") from None
            return reading.read_states(saved, [*wanted, *((RANDOM,) if place["random"] else ())], tables)

        states = self._members.states_from_first(lambda: patiently(read))
        own = {name: item for name, item in self._objects.items() if name in states}
        values = {name: reading.kind_and_state(states[name], place["path"]) for name in own}
        if self._servers is None:
            put_back(own, values)
        else:
            manifest = Manifest.read(pathlib.Path(place["path"])) if found["saved"].has_servers else None
            self._servers.load_once(partial(put_back, own, values), manifest.step if manifest else None, resumes)
        self._objects |= own
        if place["random"]:
            generators = reading.kind_and_state(states[RANDOM])[1][self._members.rank :]
            if generators and (self._servers is None or have_seed_of_process(generators[0])):
                set_all_random_states(generators[0], self._strategy)
        del states, values
        give_back_freed_memory()
        return Restored(place["path"], place["step"])

    def _fits(self, path: pathlib.Path) -> bool:
        """Whether a checkpoint is not one of the chief's own, or these objects need no more than that."""
        needed = {name: item for name, item in self._objects.items() if name not in self._added}
        return not (reading.is_of_variables(path) and beyond_variables(needed))

    def _save(
        self,
        folder: pathlib.Path,
        name: str,
        step: int | None,
        blocking: bool | None,
        then: Callable[[pathlib.Path], None],
        is_again: bool = False,
    ) -> str:
        whole_numbers(0, step=step)
        started = time.monotonic()
        blocking = not self._asynchronous if blocking is None else blocking
        with timed_phase(measures.SAVE):
            try:
                self.wait()
                self._first = self._members.first
                writes = self._members.rank == 0
                own: States = {**all_random_states(self._strategy)}
                generators = states_of_all(self._strategy, [own])
                states, refused = take(self._objects, self._strategy, self._servers, copy=not blocking, keep=writes)
                if writes:
                    states[RANDOM] = encode(generators, "random number generators", copy=False).of_kind("random")

                def place() -> dict[str, Any]:
                    if refused:
                        raise refused[0]
                    background_writes.settle(folder)
                    return patiently(lambda: choose(folder, name, step))

                chosen = self._members.from_first(place, self._first)
                target, number = pathlib.Path(chosen["path"]), int(chosen["step"])
                is_there = self._servers is not None and not self._servers.claim(target)
                if writes and not is_there:
                    # What goes wrong in the thread is raised by all members; parameter servers' workers are no members.
                    served = None if self._servers is None else _served_draft(folder, self._servers)

                    def write() -> None:
                        remove_unfinished(folder)
                        with served or CheckpointDraft(folder) as draft:
                            self._write(draft, target, number, states, is_again)
                        then(target)

                    writing: Future[None] = Future()
                    try:
                        self._writing = writing
                        background_writes.begin(writing, write, target)
                    except BaseException:  # interrupted: a thread that has begun is waited for, and no other begins
                        writing.cancel()
                        raise
                self._is_pending = True
                if blocking:
                    self.wait()
            except FirstLostError:
                logger.warning("%s was lost while it was writing: another worker writes this checkpoint", self._first)
                return self._save(folder, name, step, blocking, then, is_again=True)
        self._stall_s = time.monotonic() - started
        return str(target)

    def _write(
        self, draft: CheckpointDraft, target: pathlib.Path, step: int, states: dict[str, EncodedState], is_again: bool
    ) -> None:
        objects = {
            name: {"state": state.tree, "files": add_tensors(draft, name, state.tensors, self._max_file_bytes)}
            for name, state in states.items()
        }
        description = json.dumps({"format": reading.FORMAT, "objects": objects}, separators=(",", ":"), allow_nan=False)
        draft.add(reading.DESCRIPTION, lambda path: write_durably(path, description.encode()))
        # What the bits of a training depend on besides its script (docs/protocol.md 24).
        facts = {
            "strategy": type(self._strategy).__name__,
            "num_workers": self._members.size,
            "num_replicas_in_sync": self._strategy.num_replicas_in_sync,
            "num_threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            **self._strategy.wire,
        }
        is_newest = step >= max(steps(target.parent), default=0)
        manifest = Manifest(step=step, files=tuple(draft.files), facts=facts)
        first_wins = self._servers is not None or is_again  # its random numbers were of more workers
        draft.commit(target, manifest, is_newest=is_newest, is_same=lambda at: first_wins or draft.has_files_of(at))


def _check_name(name: str, item: Any) -> None:
    if name.startswith("_") or "/" in name or hasattr(Checkpoint, name):
        raise ConfigurationError(f"{name!r} cannot name an object of a checkpoint; choose another name")
    kind_of(name, item)


def _served_draft(folder: pathlib.Path, servers: Servers) -> CheckpointDraft:
    """A draft with the parameter servers' part in it; commits are held while they write it."""
    draft = CheckpointDraft(folder)
    try:
        draft.build_on(servers.save(draft.path))
    except BaseException:
        draft.close()
        raise
    return draft


def _remove(older: Sequence[pathlib.Path], checkpoint: pathlib.Path) -> None:
    """What was there before this checkpoint was begun. Of two workers of parameter servers that save at once none
    removes the other's."""
    for other in older:
        if other != checkpoint:
            remove(other)
