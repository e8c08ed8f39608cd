"""The stacks that a worker shows."""

from __future__ import annotations

import gc
import threading
import weakref

from stratagem.worker.servicer import thread_stacks


def test_every_thread_is_shown_and_garbage_is_collected_as_before() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="somebody")
    thread.start()
    try:
        assert any(text.startswith("somebody\n") for text in thread_stacks())
        assert gc.isenabled()
        gc.disable()
        try:
            thread_stacks()
            assert not gc.isenabled()
        finally:
            gc.enable()
    finally:
        over.set()
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
