"""A TCP relay in front of a task: its clients' connections go silent or are reset, while the processes live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Address = tuple[str, int]
_RESET = struct.pack("ii", 1, 0)
_PIECE_BYTES = 1 << 18
_LOOK_S = 0.02
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_INODE_AT = 84
"""Bytes before the inode: the netlink header (16), and of inet_diag_msg what comes before it."""


class Relay:
    """Passes bytes between its own port and a task's, in a thread of its own. Whoever connects while nobody listens at
    ``target`` (host:port) is refused; ``client_of`` says who has connected, by both ends of the connection, "" where it
    is not known."""

    def __init__(self, target: str, client_of: Callable[[Address, Address], str]) -> None:
        self.target = target
        self._client_of = client_of
        self._held: dict[str, float] = {}
        self._reset: dict[str, float] = {}
        self._pairs: dict[asyncio.StreamWriter, tuple[str, asyncio.StreamWriter]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"relay to {target}", daemon=True)
        self._thread.start()

    def hold(self, seconds: float, client: str) -> int:
        """Lets nothing of ``client`` through for ``seconds``: what comes meanwhile arrives later. Of how many
        connections."""
        self._held[client] = time.monotonic() + seconds
        return self._count(client)

    def reset(self, seconds: float, client: str) -> int:
        """Resets every connection of ``client``, and each new one in the next ``seconds``; how many there are."""
        count = self._count(client)  # before they go
        self._reset[client] = time.monotonic() + seconds
        self._loop.call_soon_threadsafe(self._reset_now)
        return count

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listener))
        self._loop.run_forever()
        server.close()
        self._held.clear()
        for writer in [*self._pairs]:
            writer.transport.abort()
        if passing := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(passing))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._client_of(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        host, _, port = self.target.rpartition(":")
        if _lasts(self._reset, client):
            return self._abort(writer)
        try:
            reader2, writer2 = await asyncio.open_connection(host, int(port or 0))
        except OSError:
            return self._abort(writer)
        self._pairs |= {writer: (client, writer2), writer2: (client, writer)}
        try:
            await asyncio.gather(self._pass(client, reader, writer2), self._pass(client, reader2, writer))
        finally:
            for each in (writer, writer2):
                self._pairs.pop(each, None)
                each.transport.abort()

    async def _pass(self, client: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                while _lasts(self._held, client):
                    await asyncio.sleep(_LOOK_S)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):  # the end of one direction is passed on, too
            writer.write_eof()

    def _count(self, client: str) -> int:
        return sum(whose == client for whose, _ in [*self._pairs.values()]) // 2

    def _reset_now(self) -> None:
        for writer, (client, _) in [*self._pairs.items()]:
            if _lasts(self._reset, client):
                self._abort(writer)

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


def owner_of(client: Address, server: Address, pids: Mapping[str, int]) -> str:
    """Which of these processes (name: id) has the client's end of a TCP connection of this machine (IPv4); "" if none
    has. The kernel is asked for the one socket (sock_diag(7)): /proc/net/tcp takes it milliseconds."""
    ends = [socket.inet_aton(host) for host, _ in (client, server)]
    wanted = struct.pack("!HH16s16sI8s", client[1], server[1], *ends, 0, b"\xff" * 8)  # on any interface, no cookie
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + wanted
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(header + request)
            reply = kernel.recv(4096)
    except OSError:  # this container may not ask
        return ""
    if struct.unpack_from("=H", reply, 4)[0] == _NLMSG_ERROR:
        return ""
    inode = f"socket:[{struct.unpack_from('=I', reply, _INODE_AT)[0]}]"
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(entry) == inode:
                        return name
    return ""


def _lasts(until: Mapping[str, float], client: str) -> bool:
    return time.monotonic() < until.get(client, 0.0)
