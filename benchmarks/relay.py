"""Passes packets between two network namespaces, each after a while: ``python -m benchmarks.relay DELAY_S END END``,
an end is "namespace,interface,address". Says "ready" when both are up, and ends with its standard input. The kernel's
netem would do the same, where there is one. Standard library only."""

from __future__ import annotations

import collections
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time

_SET_NAME = 0x400454CA
_PLAIN_PACKETS = 0x1001  # IFF_TUN | IFF_NO_PI
_MTU = 65520
"""So that few packets take the processor."""


def end_of(namespace: str, interface: str, address: str) -> int:
    """The file of an interface in a namespace."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    here = f"relay{os.getpid()}-{file}"  # where another may have the name that it gets there
    fcntl.ioctl(file, _SET_NAME, struct.pack("16sH22x", here.encode(), _PLAIN_PACKETS))
    _ip("link", "set", here, "netns", namespace, "name", interface)
    _ip("-netns", namespace, "link", "set", interface, "mtu", str(_MTU), "up")
    _ip("-netns", namespace, "address", "add", f"{address}/24", "dev", interface)
    return file


def relay(source: int, target: int, delay_s: float) -> None:
    """Without end."""
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    some = threading.Semaphore(0)

    def deliver() -> None:
        while True:
            some.acquire()
            at, packet = waiting.popleft()
            time.sleep(max(0.0, at - time.monotonic()))
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    while True:
        packet = os.read(source, _MTU)
        waiting.append((time.monotonic() + delay_s, packet))
        some.release()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    delay, ends = float(sys.argv[1]), [end_of(*end.split(",")) for end in sys.argv[2:4]]
    for pair in (ends, ends[::-1]):
        threading.Thread(target=relay, args=(*pair, delay), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
