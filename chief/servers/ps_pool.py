"""All ps together: one call to each, repeated while the ps is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.servers.servers import Server, ServerDescription
from stratagem.cluster.incarnation import Incarnation
from stratagem.errors import PeerUnavailableError

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Pause before a call to a ps that did not answer is made again."""

_Result = TypeVar("_Result")

Connect = Callable[[Incarnation, str], Server]


class PsPool:
    """The connections to the ps with an open session; a call to one whose session is over is given up."""

    def __init__(self, connect: Connect, sessions: Sessions) -> None:
        self._connect = connect
        self._sessions = sessions
        self.without_memory: set[Incarnation] = set()
        """ps that came back, and to which nothing could be given: they are in no checkpoint."""
        self._servers: dict[Incarnation, Server] = {}

    @property
    def num_ps(self) -> int:
        """How many there are when all are there."""
        return self._sessions.num_ps

    @property
    def servers(self) -> list[Server]:
        """Those with an open session, by index."""
        return [self._servers[incarnation] for incarnation in sorted(self._servers) if self._is_open(incarnation)]

    @property
    def ready(self) -> list[Server]:
        """Those that workers may use; a ps that has just come back has no values."""
        ready = (server for server in self.servers if self._sessions.is_live(server.incarnation))
        return [server for server in ready if server.incarnation not in self.without_memory]

    def add(self, incarnation: Incarnation, address: str) -> Server:
        if incarnation not in self._servers:
            self._servers[incarnation] = self._connect(incarnation, address)
        return self._servers[incarnation]

    def get(self, incarnation: Incarnation) -> Server | None:
        return self._servers.get(incarnation)

    async def drop_lost(self) -> None:
        for incarnation in [incarnation for incarnation in self._servers if not self._is_open(incarnation)]:
            await self._servers.pop(incarnation).close()

    async def insist(self, server: Server, call: Callable[[Server], Awaitable[_Result]]) -> _Result | None:
        """Calls until an answer comes; None when the ps is lost before, or has been left out and taken in again since.

        Raises:
            StratagemError: the ps refused.
        """
        level = logging.INFO
        while self._is_open(server.incarnation) and self._servers.get(server.incarnation) is server:
            try:
                return await call(server)
            except PeerUnavailableError as error:
                logger.log(level, "%s did not answer, asking until it does: %s", server.incarnation.task, error)
                level = logging.DEBUG
                await asyncio.sleep(RETRY_S)
        return None

    async def insist_all(self, call: Callable[[Server], Awaitable[_Result]]) -> dict[Incarnation, _Result]:
        """As :meth:`insist` on every ps at once, without those that serve no more when all have answered."""
        servers = self.servers
        answers = zip(servers, await asyncio.gather(*(self.insist(server, call) for server in servers)), strict=True)
        here = self.servers
        return {server.incarnation: each for server, each in answers if each is not None and server in here}

    async def describe(self) -> dict[Incarnation, ServerDescription]:
        return await self.insist_all(lambda server: server.describe_units())

    async def describe_all(self) -> dict[Incarnation, ServerDescription]:
        """The same of all there are: one that is away may have most updates.

        Raises:
            PeerUnavailableError: one is.
        """
        described = await self.describe()
        if len(described) < (num_ps := self.num_ps):
            raise PeerUnavailableError(f"{num_ps - len(described)} of {num_ps} ps are away")
        return described

    def _is_open(self, incarnation: Incarnation) -> bool:
        return incarnation in self._sessions.servers

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()
        self._servers.clear()
