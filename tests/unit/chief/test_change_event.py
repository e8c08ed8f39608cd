"""Waiting for the state of the chief to change."""

from __future__ import annotations

import asyncio

import pytest

from stratagem.chief.chief_state import ChangeEvent


async def test_a_change_before_the_wait_has_begun_is_not_missed() -> None:
    changed = ChangeEvent()
    waiting = asyncio.create_task(asyncio.wait_for(changed.wait(), 5.0))  # not begun until this coroutine waits
    changed.notify()
    await waiting


async def test_a_change_before_the_call_is_not_waited_for() -> None:
    changed = ChangeEvent()
    changed.notify()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(changed.wait(), 0.01)
