"""Which checkpoint the ps roll back to: the newest that is whole on every one of them; and what is lost by that."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stratagem.checkpoint.durable import check_disk, set_aside
from stratagem.checkpoint.manifest import MANIFEST
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.servers.servers import PsPool, Server, read_patiently
from stratagem.errors import CheckpointError, UnreadableError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class RestoredServers:
    """The checkpoint that ps were rolled back to."""

    path: pathlib.Path
    manifest: ServersManifest
    num_undone: int = 0
    """Updates that newer checkpoints had which are not whole, on the ps that had most."""


class Restoring:
    """Rolls ps back to checkpoints in ``directory``, if any. They check their own files; the chief compares what they
    report."""

    def __init__(self, ps_pool: PsPool, directory: str) -> None:
        self.directory = directory
        self._ps_pool = ps_pool

    async def has_checkpoints(self) -> bool:
        """Whether there is anything to go back to, whole or not. UnreadableError: nobody can tell."""
        return bool(await self._scan())

    async def newest(self, servers: Sequence[Server], is_new: bool = False) -> RestoredServers | None:
        """Puts these ps back to the newest checkpoint that is whole on each of them; None when there is none at all.

        Those that are not whole are set aside, so that nobody takes them for checkpoints again. CheckpointError: none
        is whole; or the job ``is_new``, and a newer one is of another strategy. UnreadableError: nobody can tell
        whether one is whole; none is set aside. ForbiddenError: a ps was not started for this directory.
        """
        found = await self._scan()
        left_out: list[tuple[pathlib.Path, int, str]] = []
        for path, step, manifest in found:
            if is_new and manifest is None and (strategy := await _read(checkpoints.other_strategy, path)):
                raise CheckpointError(
                    f"{path} was saved under {strategy}, so parameter servers cannot go back to it, and would set it "
                    "aside: give another --checkpoint-dir, and let the script restore from this one, or move it away"
                )
            why = await self._refusals(servers, path, manifest)
            if manifest is None or why:
                logger.warning("Leaving out the checkpoint %s: %s", path, why)
                left_out.append((path, step, why))
                continue
            undone = max((step - manifest.step for _, step, _ in left_out), default=0)
            if left_out:
                for damaged, _, _ in left_out:
                    try:
                        logger.warning("%s is now %s", damaged, set_aside(damaged))
                    except OSError as error:
                        logger.warning("%s could not be moved out of the way: %s", damaged, error)
                logger.warning(
                    "Rolling back to step %d (%s), which is complete on every ps: %d updates in newer checkpoints "
                    "are undone and recomputed",
                    manifest.step,
                    path,
                    undone,
                )
            return RestoredServers(path, manifest, undone)
        if left_out:
            newest, _, why = left_out[0]
            raise CheckpointError(
                f"none of the {len(left_out)} checkpoints in {self.directory} is complete on every ps (the newest, "
                f"{newest.name}: {why}). To start from scratch, move them away or give another --checkpoint-dir"
            )
        return None

    async def _scan(self) -> list[tuple[pathlib.Path, int, ServersManifest | None]]:
        """All there are, newest first."""

        def scan() -> list[tuple[pathlib.Path, int, ServersManifest | None]]:
            try:
                os.scandir(self.directory).close()
            except OSError as error:  # which looking for names in it passes over
                check_disk(error, f"{self.directory} cannot be read by the chief")
            return checkpoints.scan_all(self.directory, ServersManifest.find)

        return await _read(scan) if self.directory else []

    async def _refusals(self, servers: Sequence[Server], path: pathlib.Path, manifest: ServersManifest | None) -> str:
        if manifest is None:
            return f"its {MANIFEST} is missing, cannot be read or was altered"
        answers = await asyncio.gather(*(self.refusal(server, str(path)) for server in servers))
        return "; ".join(answer for answer in answers if answer)

    async def refusal(self, server: Server, path: str, *, is_fresh: bool = False) -> str:
        """Puts one ps back to a checkpoint; why it could not be; empty: it was, or is lost. UnreadableError: nobody can
        tell whether it is whole."""
        num_ps = self._ps_pool.num_ps
        try:
            await self._ps_pool.insist(server, lambda each: each.restore_shards(path, num_ps, is_fresh=is_fresh))
        except UnreadableError:
            raise
        except CheckpointError as error:
            return str(error)
        return ""


async def _read(read: Callable[..., _Result], *arguments: Any) -> _Result:
    return await read_patiently(lambda: asyncio.to_thread(read, *arguments))
