"""Limits as arithmetic: calls by peer, entries of lists, log lines, frames that wait."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path

import pytest
import torch

from stratagem.cluster.config import PsConfig
from stratagem.errors import ForbiddenError, LimitError
from stratagem.rpc import logs
from stratagem.rpc.codec import Frame, frame_of
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.generated import chief_pb2, common_pb2, frame_pb2, ps_pb2
from stratagem.rpc.inbox import Inbox
from stratagem.rpc.limits import CallCounter, check_ids
from stratagem.rpc.logs import Throttle


def test_calls_are_counted_by_peer_and_together() -> None:
    counter = CallCounter(PsConfig(task="ps:0", max_calls=3, max_calls_per_peer=2))
    with counter.counted("a", never), counter.counted("a", never):
        with pytest.raises(LimitError, match="a has 2 calls in flight, which is max_calls_per_peer"):
            counter.counted("a", never).__enter__()
        with counter.counted("b", never), pytest.raises(LimitError, match="3 calls are in flight, which is max_calls;"):
            counter.counted("c", never).__enter__()
    with counter.counted("a", never), counter.counted("a", never):  # neither those that ended nor those refused count
        pass


def never() -> None:
    pytest.fail("this call was cancelled")


def test_a_call_whose_request_does_not_come_goes_when_its_place_is_needed() -> None:
    now = 0.0
    cancelled: list[str] = []
    counter = CallCounter(PsConfig(task="ps:0", max_calls=3, max_calls_per_peer=3), lambda: now)
    with contextlib.ExitStack() as calls:
        for name in ("first", "second"):
            call = calls.enter_context(counter.counted("a", lambda name=name: cancelled.append(name)))  # type: ignore[misc]
            calls.enter_context(counter.waiting(call))
            now += 4.0
        calls.enter_context(counter.counted("a", never))  # its request has come
        with counter.counted("b", never):  # the second has not waited for long
            assert cancelled == ["first"]
            with pytest.raises(LimitError, match="max_calls"):
                counter.counted("c", never).__enter__()
        now += 10.0
        with counter.counted("b", never), pytest.raises(LimitError):
            calls.enter_context(counter.counted("c", never))
            counter.counted("d", never).__enter__()
        assert cancelled == ["first", "second"]
    assert counter._num_calls == 0 and not counter._by_peer and not counter._waiting


def test_who_has_too_many_calls_costs_no_other_one_any() -> None:
    now = 0.0
    counter = CallCounter(PsConfig(task="ps:0", max_calls=9, max_calls_per_peer=1), lambda: now)
    with counter.counted("a", never) as call, counter.waiting(call), counter.counted("b", never):
        now = 10.0
        with pytest.raises(LimitError, match="b has 1 calls in flight"):
            counter.counted("b", never).__enter__()


def test_entries_are_counted_through_all_levels() -> None:
    request = chief_pb2.NextUnitsRequest(accepted=range(200, 300))
    check_ids(request, 100)
    with pytest.raises(LimitError, match=r"a NextUnitsRequest has 100 entries or more, over max_ids_per_request of 99"):
        check_ids(request, 99)
    update = common_pb2.Update(units=[common_pb2.Unit(index=1)] * 30)
    nested = ps_pb2.CloseStepRequest(committed=[update] * 4)
    check_ids(nested, 124)
    with pytest.raises(LimitError):
        check_ids(nested, 123)
    named = ps_pb2.AssignValuesRequest()
    named.scalars.update({f"s{index}": [1.0] * 10 for index in range(5)})
    check_ids(named, 55)
    with pytest.raises(LimitError):
        check_ids(named, 54)


def test_log_lines_of_a_kind_are_few_and_the_others_counted() -> None:
    throttle = Throttle(burst=2, period_s=10.0)
    assert [throttle.admit("a", now) for now in (0.0, 1.0, 2.0, 3.0, 9.9)] == [0, 0, None, None, None]
    assert throttle.admit("b", 3.0) == 0
    assert [throttle.admit("a", now) for now in (10.0, 11.0, 12.0)] == [3, 0, None]
    assert throttle.admit("a", 100.0) == 1


def test_kinds_that_somebody_makes_up_take_no_memory_for_ever() -> None:
    throttle = Throttle()
    for index in range(5000):
        throttle.admit(f"kind {index}", 0.0)
    assert len(throttle._kinds) <= 1024


def test_no_line_of_theirs_looks_like_one_of_ours() -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs._TextFormatter("ps:0"))
    handler.handle(logging.makeLogRecord({"msg": "%s refused", "args": ("a\n12:00:00 I ps:0: all is well\x1b[2J",)}))
    assert text.getvalue().endswith(" ps:0: a\\n12:00:00 I ps:0: all is well\\x1b[2J refused\n")
    assert text.getvalue().count("\n") == 1


def test_frames_that_nobody_asked_for_are_bounded() -> None:
    inbox = Inbox("ps:0", max_bytes=64)
    frame = Frame(1, 5, 1, 0, torch.zeros(8))
    assert inbox.put(frame) and inbox.put(frame)
    inbox.take(5, 0.0)
    assert inbox.put(frame)
    with pytest.raises(LimitError, match=r"96 bytes of frames from ps:0 wait .* max_inbox_bytes of 64"):
        inbox.put(frame)
    inbox.forget(5)
    assert inbox.put(Frame(1, 6, 1, 0, torch.zeros(16)))
    replies = Inbox("ps:0", max_bytes=64)
    reply = frame_of(frame_pb2.COMMIT_UPDATE, 5, 0, 0, torch.uint8, bytearray(40))  # travels without a tensor
    assert reply.message and replies.put(reply)
    with pytest.raises(LimitError, match=r"80 bytes of frames from ps:0 wait"):
        replies.put(reply)


@pytest.mark.parametrize(
    "asked", ["{root}/../elsewhere", "{root}/link", "{root}/link/deeper", "/", "", "relative", "{root}x", "{root}/a\0b"]
)
def test_places_elsewhere_are_refused(tmp_path: Path, asked: str) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(ForbiddenError, match=f"below {root}"):
        AllowedFolders([str(root)]).resolve(asked.format(root=root))


def test_places_below_a_root_are_what_they_are_without_links(tmp_path: Path) -> None:
    folders = AllowedFolders.of(str(tmp_path / "a"), f"{tmp_path / 'b'}:{tmp_path / 'c'}")
    (tmp_path / "b").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "b")
    assert folders.resolve(str(tmp_path / "a" / "new" / "..")) == tmp_path / "b"
    assert folders.resolve(str(tmp_path / "c" / "x")) == tmp_path / "c" / "x"
    with pytest.raises(ForbiddenError, match="below no folder at all"):
        AllowedFolders.of("", "").resolve(str(tmp_path))
