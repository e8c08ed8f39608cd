"""The stacks that workers and ps show."""

from __future__ import annotations

import gc
import threading
import weakref

from stratagem.rpc.observer import thread_stacks
from tests.polling import until


def wait_here(over: threading.Event) -> None:
    over.wait()


def test_every_thread_is_shown_with_its_frames() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=wait_here, args=(over,), name=f"somebody-{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: "".join(thread_stacks()).count(" in wait_here\n    over.wait()\n") == len(threads))
        stacks = thread_stacks()
        assert len(stacks) >= threading.active_count()
        for thread in threads:
            (stack,) = (text for text in stacks if text.startswith(f"{thread.name}\n"))
            _, *frames = stack.splitlines()
            assert frames[0].endswith(" in _bootstrap"), "the outermost frame first"
            assert frames[frames.index("    over.wait()") - 1].endswith(" in wait_here")
        (own,) = (text for text in stacks if text.startswith("MainThread\n"))
        assert own.splitlines()[-2].endswith(" in thread_stacks")
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_many_may_ask_at_once() -> None:
    def ask() -> None:
        for _ in range(20):
            thread_stacks()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_what_is_shown_is_let_go_of_without_a_collection() -> None:
    class Local:
        pass

    def show() -> weakref.ref[Local]:
        local = Local()
        thread_stacks()
        return weakref.ref(local)

    gc.disable()
    try:
        assert show()() is None
    finally:
        gc.enable()
