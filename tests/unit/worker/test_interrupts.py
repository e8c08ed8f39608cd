"""Where an interrupt may break in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from types import FrameType

import pytest

from stratagem.worker.interrupts import inside_grpc


def frame_in(module: str) -> FrameType:
    """A frame of a function that lives in ``module``."""
    code = compile("def here():\n    import sys\n    return sys._getframe()\n", module, "exec")
    namespace = types.ModuleType(module).__dict__
    exec(code, namespace)
    frame: FrameType = namespace["here"]()
    return frame


def test_our_own_code_and_the_scripts_may_be_interrupted() -> None:
    assert not inside_grpc(sys._getframe())
    assert not inside_grpc(frame_in("train"))
    assert not inside_grpc(None)


def test_code_of_grpc_may_not() -> None:
    assert inside_grpc(frame_in("grpc"))
    assert inside_grpc(frame_in("grpc._channel"))
    assert not inside_grpc(frame_in("grpcish"))


def test_waiting_may_be_interrupted() -> None:
    event = threading.Event()
    waiter = threading.Thread(target=event.wait, args=(60,))
    waiter.start()
    try:
        deadline = time.monotonic() + 60
        frame = sys._current_frames().get(waiter.ident or 0)
        while frame is None or frame.f_code.co_name != "wait" or frame.f_locals.get("waiter") is None:
            assert time.monotonic() < deadline
            frame = sys._current_frames().get(waiter.ident or 0)
        assert not inside_grpc(frame)
    finally:
        event.set()
        waiter.join()


FENCED = """
import signal, sys, threading, time
from stratagem.worker import interrupts
interrupts.END_S = 0.1
interrupts.install()
if sys.argv[1] == "handles it":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("by its own handler"))
interrupts.preemption.end_soon("the chief calls it dead")
print(threading.active_count(), flush=True)
if threading.active_count() > 1:
    time.sleep(600)  # a step that takes long
"""


@pytest.mark.parametrize(
    ("script", "ends_with"), [("has none", 143), pytest.param("handles it", 0, marks=pytest.mark.thorough)]
)
def test_a_worker_that_takes_part_no_more_ends_in_the_middle_of_a_step(script: str, ends_with: int) -> None:
    done = subprocess.run([sys.executable, "-c", FENCED, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == ends_with, done.stderr
