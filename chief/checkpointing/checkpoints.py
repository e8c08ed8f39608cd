"""Checkpoint directories: begin, commit by one rename, find the newest, remove old ones.

A checkpoint is ``<directory>/step-00000100/``: per ps ``ps-<i>.safetensors`` (tensors by variable) and ``ps-<i>.json``
(rows, slots, units), and ``manifest.json``, which makes it complete. Nothing is ever written into a complete one.
``latest`` is a text file for people; programs take the highest (step, chief epoch, updates, time) among the manifests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from stratagem.checkpoint import catalog
from stratagem.checkpoint.draft import CheckpointDraft
from stratagem.checkpoint.durable import GIVE_ANOTHER, way_out
from stratagem.checkpoint.manifest import Manifest
from stratagem.chief.counting.metric_states import Logs, decode_logs, encode_logs
from stratagem.chief.journal.history import decode_positions, encode_positions
from stratagem.chief.leasing.positions import Positions, minus, plus
from stratagem.cluster.units import Plan, Topic, UnitBitmap
from stratagem.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"\w[\w.-]*")
"""A name that a ps may report: of a file in the checkpoint's own folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersManifest(Manifest):
    """What else the chief needs to know to resume from a checkpoint."""

    plans: Mapping[int, Plan]
    accepted: Mapping[tuple[int, int], UnitBitmap]
    """Accepted units of each (dataset, epoch): their updates are in the shards."""
    applied: Mapping[tuple[int, int], UnitBitmap]
    """Units that were not accepted but had an update in the shards, of all ps that take part in it."""
    unfinished: Mapping[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """Those of ``applied`` that were to have more updates: a second optimizer's, say."""
    next_step: int
    """Staleness 0: number of the step that is composed next."""
    num_groups: int = 0
    """Shard groups in it, counted on each ps. A model that is prepared at the same step adds some."""
    num_distinct: int = 0
    """Of these, those with a number of their own: the same on any number of ps. 0: it is not known."""
    num_updates: int = 0
    """In it, of all groups together: a model may be trained at the same step too, that of another one before it.
    Another number of ps goes on from this number. 0: it is not known."""
    logs: Mapping[Topic, Logs] = dataclasses.field(default_factory=dict)
    """What came of epochs that were over."""

    @property
    def done(self) -> Positions:
        """Units with all of their updates in it, reported or not."""
        return plus(self.accepted, minus(self.applied, self.unfinished))

    @property
    def num_ps(self) -> int:
        """ps that wrote it."""
        return len({file.ps for file in self.files})

    def lacks(self, num_groups: int, num_updates: int, num_ps: int, num_distinct: int = 0) -> bool:
        """Whether a model was trained since, or prepared; on another number of ps ``num_distinct`` says the latter."""
        if 0 < self.num_updates < num_updates:
            return True
        return self.num_groups < num_groups if self.num_ps == num_ps else 0 < self.num_distinct < num_distinct

    def content(self) -> dict[str, Any]:
        return super().content() | {
            "next_step": self.next_step,
            "num_groups": self.num_groups,
            "num_distinct": self.num_distinct,
            "num_updates": self.num_updates,
            "plans": [  # staleness as a string: JSON knows no infinity
                {"dataset": dataset, **dataclasses.asdict(plan), "staleness": str(plan.staleness)}
                for dataset, plan in sorted(self.plans.items())
            ],
            "accepted": encode_positions(self.accepted),
            "applied": encode_positions(self.applied),
            "unfinished": encode_positions(self.unfinished),
            "logs": encode_logs(self.logs),
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`content`; errors as there."""
        common = Manifest.of(content)
        plans = {}
        for plan in content["plans"]:
            fields = {key: each for key, each in plan.items() if key != "dataset"}
            plans[plan["dataset"]] = Plan(**{**fields, "staleness": float(fields["staleness"])})
        return cls(
            **{name: getattr(common, name) for name in ("step", "files", "chief_epoch", "automatic", "created")},
            plans=plans,
            accepted=decode_positions(content["accepted"]),
            applied=decode_positions(content["applied"]),
            unfinished=decode_positions(content.get("unfinished", [])),
            next_step=content["next_step"],
            num_groups=int(content.get("num_groups", 0)),
            num_distinct=int(content.get("num_distinct", 0)),
            num_updates=int(content.get("num_updates", 0)),
            logs=decode_logs(content.get("logs", [])),
        )


def begin(directory: str) -> CheckpointDraft:
    """Makes the directory that the ps write into, with a nonce that proves that they see the same file system.
    CheckpointError: the directory cannot be made."""
    try:
        draft = CheckpointDraft(pathlib.Path(directory).absolute())
        with contextlib.ExitStack() as undone:
            undone.enter_context(draft)
            (draft.path / "nonce").write_text(draft.nonce)
            undone.pop_all()
    except (CheckpointError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        advice = way_out(cause, GIVE_ANOTHER)
        what = f"cannot write into {directory}: {error.strerror}" if isinstance(error, OSError) else error
        raise CheckpointError(f"{what}; {advice}") from None
    return draft


def commit(draft: CheckpointDraft, manifest: ServersManifest, replaces: bool = False) -> pathlib.Path:
    """Makes a draft a checkpoint by one rename; returns its path.

    When the same weights were committed at the same step before, that checkpoint is returned and the draft removed; so
    is one that a script saved of the same state, which has its buffers and counters too. An automatic one of this step
    is replaced that was taken before another model was prepared or trained, or in the middle of a batch; with
    ``replaces`` also one of other weights. It is removed when the new one is there. Beside one that a script has given
    this number, or asked for before another model was trained, the new one has more digits.
    CheckpointError: a file is missing or short, or a checkpoint of this step with other weights exists, or one that
    cannot be read now.
    """

    def lacks_some(before: ServersManifest) -> bool:
        # A ps that was asked what it has may hear of a further model before it writes.
        is_smaller = before.num_ps == manifest.num_ps and _num_bytes(before) < _num_bytes(manifest)
        counts = manifest.num_groups, manifest.num_updates, manifest.num_ps, manifest.num_distinct
        return is_smaller or before.lacks(*counts)

    def is_same(there: pathlib.Path) -> bool:
        existing = ServersManifest.find(there)  # what has no values yet is written as zeros
        return existing is not None and not lacks_some(existing) and _digests(existing) == _digests(manifest)

    with draft:
        for file in manifest.files:
            if not _FILE.fullmatch(file.name):
                raise CheckpointError(f"a ps reported a file of the name {file.name!r}, which is not a plain name")
            written = draft.path / file.name
            if not written.is_file() or written.stat().st_size != file.num_bytes:
                raise CheckpointError(f"expected {file.num_bytes} bytes in {written}, which a ps reported as written")
        if manifest.automatic and (saved := _saved_by_script(draft.path.parent, manifest)) is not None:
            return saved
        (draft.path / "nonce").unlink()
        target = draft.path.parent / f"step-{manifest.step:08d}"
        before = ServersManifest.find(target)
        of_script = (target / catalog.HOST).is_dir()  # which counts otherwise
        was_asked_for = before is not None and not before.automatic and lacks_some(before)
        if (of_script or was_asked_for) and not is_same(target):
            target = target.with_name(f"step-{manifest.step:012d}")
            before = ServersManifest.find(target)
        is_over = before is not None and (replaces or before.unfinished or lacks_some(before))
        is_of_as_many = before is None or before.num_ps == manifest.num_ps
        what = "other weights" if is_of_as_many else "the files of another number of ps"
        with contextlib.ExitStack() as undone:
            replaced = None
            if before is not None and before.automatic and is_over and not is_same(target):
                with contextlib.suppress(OSError):
                    replaced = target.rename(_longer(target))  # a checkpoint still, until the new one is there
                    undone.callback(replaced.rename, target)
            draft.commit(target, manifest, is_newest=True, is_same=is_same, what=what)
            undone.pop_all()
        if replaced is not None:
            catalog.remove(replaced)
    return target


def _saved_by_script(directory: pathlib.Path, manifest: ServersManifest) -> pathlib.Path | None:
    """The newest checkpoint, for the chief and for all who look by its script's number, if it lacks nothing."""
    path = catalog.newest(directory)
    there = ServersManifest.read(path) if path is not None and (path / catalog.HOST).is_dir() else None
    if there is None or (path, there) != newest(str(directory)):
        return None
    return path if _state_of(there) == _state_of(manifest) else None


def _state_of(manifest: ServersManifest) -> tuple[object, ...]:
    """What a job that resumes from it goes by."""
    counts = manifest.step, manifest.next_step, manifest.num_groups, manifest.num_updates
    return counts, _digests(manifest), manifest.done, manifest.unfinished, manifest.plans, manifest.logs


def _longer(target: pathlib.Path) -> pathlib.Path:
    """A free name of the same step, with more digits."""
    while target.exists():
        target = target.with_name(target.name.replace("-", "-0000"))
    return target


Read = Callable[[pathlib.Path], ServersManifest | None]


def scan_all(
    directory: str, read: Read = ServersManifest.read
) -> list[tuple[pathlib.Path, int, ServersManifest | None]]:
    """Newest first, what is or was a checkpoint: path, step and manifest; without one that can be read, by its name."""
    found = []
    for path in pathlib.Path(directory).absolute().glob("step-*/"):
        if named := _NAME.fullmatch(path.name):
            manifest = read(path)
            key = int(named[1]), 0, 0, ""
            if manifest is not None:
                key = manifest.step, manifest.chief_epoch, manifest.num_updates, manifest.created
            found.append((key, path, manifest))
    return [(path, key[0], manifest) for key, path, manifest in sorted(found, key=lambda each: each[0], reverse=True)]


def scan(directory: str, read: Read = ServersManifest.read) -> list[tuple[pathlib.Path, ServersManifest]]:
    """Complete checkpoints, oldest first."""
    return [(path, manifest) for path, _, manifest in reversed(scan_all(directory, read)) if manifest is not None]


def newest(directory: str, read: Read = ServersManifest.read) -> tuple[pathlib.Path, ServersManifest] | None:
    """The complete checkpoint with the highest step, of the newest chief."""
    return next(reversed(scan(directory, read)), None)


def other_strategy(path: pathlib.Path) -> str:
    """The strategy under which a script saved it without parameter servers; empty: it is none of these.
    UnreadableError: nobody can tell now."""
    manifest = Manifest.find(path)
    strategy = "" if manifest is None or any(file.ps for file in manifest.files) else manifest.facts.get("strategy", "")
    return "" if strategy == "ParameterServerStrategy" else str(strategy)


def prune(directory: str, keep: int) -> list[pathlib.Path]:
    """Removes automatic checkpoints beyond the newest ``keep`` complete ones; returns what was removed."""
    removed = [path for path, manifest in scan(directory)[:-keep] if manifest.automatic]
    for path in removed:
        catalog.remove(path)
    return removed


def _num_bytes(manifest: ServersManifest) -> int:
    """Of weights and optimizer state."""
    return sum(file.num_bytes for file in manifest.files if file.name.endswith(".safetensors"))


def _digests(manifest: ServersManifest) -> dict[str, str]:
    return {file.name: file.sha256 for file in manifest.files if file.name.endswith(".safetensors")}
