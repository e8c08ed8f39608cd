"""What may be acknowledged while another ps copies this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from stratagem.cluster.membership import Member, Membership
from stratagem.errors import PeerUnavailableError
from stratagem.ps.backup import MIN_TOLD_BYTES, Backup
from stratagem.ps.requests import Sender
from tests.polling import until
from tests.unit.ps.driver import ListLane

DEADLINE_S = 60.0
COMMIT, FOLLOWED = 7, 13
FIRST, SECOND = Sender("ps:1", 5), Sender("ps:1", 9)


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error

    @property
    def waits(self) -> bool:
        """Whether it has not returned after a moment."""
        self._thread.join(0.05)
        return self._thread.is_alive()

    def returns(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "it waits for ever"


@pytest.fixture
def backup() -> Iterator[Backup]:
    made = Backup(lambda: 0)
    yield made
    made.close()


def tell(backup: Backup, name: bytes = b"update", num_elements: int = 3) -> None:
    backup.tell(COMMIT, lambda: name, {1: [(0, torch.zeros(num_elements))]})


def begin(backup: Backup, asker: Sender = FIRST, number: int = 1) -> tuple[ListLane, int]:
    lane, numbers = ListLane(), list[int]()
    backup.begin(asker, number, lane, 1, numbers.append)
    backup.confirm(asker, 0)
    return lane, numbers[0]


def membership(backup: Sender, copies_dropped: int = 0, live: bool = True) -> Membership:
    member = Member(backup.task, "host:1", backup.incarnation, live=live, copies_dropped=copies_dropped)
    return Membership(ready=True, members=(member,))


def whole(backup: Backup, asker: Sender = FIRST) -> tuple[ListLane, int]:
    lane, number = begin(backup, asker)
    backup.confirm(asker, number + 1)
    return lane, number


def test_nobody_waits_for_a_backup_that_is_not_whole(backup: Backup) -> None:
    tell(backup)
    backup.settle()
    assert backup.words == "none"
    lane, number = begin(backup)
    assert number == 0, "a change that nobody was told is in what the backup begins with"
    tell(backup)
    backup.settle()
    assert (backup.words, lane.answers, len(lane.frames)) == ("ps:1 copies", [(COMMIT, b"update")], 1)


def test_what_a_heartbeat_says_does_not_wait_for_an_image_that_is_being_made(backup: Backup) -> None:
    """Of gigabytes it takes longer than a ps may be silent."""
    said: list[tuple[str, int]] = []

    def make(told: int) -> None:
        heartbeat = Waiting(lambda: said.append((backup.words, backup.copy_to_drop)))
        until(lambda: not heartbeat.waits, deadline_s=5.0)

    backup.begin(FIRST, 1, ListLane(), 1, make)
    assert said == [("ps:1 copies", 0)]


def test_from_then_on_a_change_is_acknowledged_when_the_backup_has_it(backup: Backup) -> None:
    lane, _ = begin(backup)
    tell(backup, b"before")
    backup.confirm(FIRST, 1)
    assert lane.answers == [(COMMIT, b"before"), (FOLLOWED, b"\0")], "whole, and what came before is there"
    waiting = Waiting(backup.settle)
    assert waiting.waits, "what it was told before has to be there too"
    tell(backup, b"after")
    later = Waiting(backup.settle)
    backup.confirm(FIRST, 2)
    waiting.returns()
    assert later.waits
    backup.confirm(FIRST, 3)
    later.returns()
    assert backup.words == "ps:1"


def test_a_backup_that_follows_anew_has_its_last_copy_until_it_says_that_it_dropped_it(backup: Backup) -> None:
    """What that lacked was acknowledged, and the ps died before the backup had heard that it begins again."""
    whole(backup)
    tell(backup)
    waiting = Waiting(backup.settle)
    backup.begin(FIRST, 2, ListLane(), 1, lambda told: None)
    assert waiting.waits and backup.words == "ps:1 copies"
    backup.confirm(FIRST, 0)
    waiting.returns()


@pytest.mark.parametrize("end", ["lets go", "dies", "is fenced", "another process"])
def test_a_copy_that_broke_off_holds_everybody_up_until_nobody_can_take_it(backup: Backup, end: str) -> None:
    lane, _ = whole(backup)
    tell(backup)
    waiting = Waiting(backup.settle)
    backup.lost(lane)
    tell(backup)
    later = Waiting(backup.settle)
    backup.look(membership(FIRST))
    assert waiting.waits and later.waits and backup.words == "ps:1 broke off"
    if end == "lets go":
        begin(backup)
    elif end == "dies":
        backup.look(membership(SECOND))
    elif end == "is fenced":
        backup.fence("ps:2", FIRST.incarnation)
        backup.fence(FIRST.task, FIRST.incarnation - 1)
        assert waiting.waits
        backup.fence(FIRST.task, FIRST.incarnation)
    else:
        begin(backup, SECOND)
    waiting.returns()
    later.returns()


def test_a_chief_that_has_just_started_ends_no_copy(backup: Backup) -> None:
    """It had not heard of the backup yet, which had its copy, could be asked for it, and was told nothing any more."""
    lane, _ = whole(backup)
    backup.look(membership(FIRST, live=False))
    backup.look(Membership())
    assert (backup.words, lane.closed) == ("ps:1", None)
    tell(backup)
    waiting = Waiting(backup.settle)
    assert waiting.waits
    backup.confirm(FIRST, 2)
    waiting.returns()


def test_a_change_that_is_not_told_ends_the_copy_before_it_is_acknowledged(backup: Backup) -> None:
    lane, _ = whole(backup)
    backup.outdate()
    assert isinstance(lane.closed, PeerUnavailableError)
    waiting = Waiting(backup.settle)
    assert waiting.waits
    begin(backup)
    waiting.returns()


def test_a_confirmation_of_another_process_counts_for_nothing(backup: Backup) -> None:
    whole(backup, SECOND)
    tell(backup)
    waiting = Waiting(backup.settle)
    backup.confirm(FIRST, 2)
    assert waiting.waits
    backup.confirm(SECOND, 2)
    waiting.returns()


def test_numbers_go_on_with_the_next_backup(backup: Backup) -> None:
    whole(backup)
    tell(backup)
    backup.confirm(FIRST, 2)
    _, number = begin(backup, SECOND)
    assert number == 1
    backup.confirm(SECOND, 2)
    tell(backup)
    waiting = Waiting(backup.settle)
    assert waiting.waits
    backup.confirm(SECOND, 3)
    waiting.returns()


def test_a_backup_that_lags_behind_is_waited_for(backup: Backup) -> None:
    begin(backup)
    tell(backup, num_elements=MIN_TOLD_BYTES // 4 + 1)
    waiting = Waiting(lambda: tell(backup))
    assert waiting.waits
    backup.confirm(FIRST, 2)
    waiting.returns()


def test_at_the_end_nobody_gets_an_acknowledgement_that_is_not_true(backup: Backup) -> None:
    whole(backup)
    tell(backup)
    waiting = Waiting(backup.settle)
    assert waiting.waits
    backup.close()
    waiting.returns()
    assert isinstance(waiting.error, PeerUnavailableError)


def test_a_backup_that_is_silent_is_asked_to_drop_its_copy(backup: Backup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.ps.backup.SILENCE_S", 0.05)
    lane, _ = begin(backup, number=3)
    backup.confirm(FIRST, 1)
    assert backup.copy_to_drop == 0, "nobody waits"
    tell(backup)
    waiting = Waiting(backup.settle)
    until(lambda: backup.copy_to_drop == 3)
    backup.look(membership(FIRST, copies_dropped=2))
    assert waiting.waits, "an older one, whose place this copy has taken"
    backup.look(membership(FIRST, copies_dropped=3))
    waiting.returns()
    assert (backup.copy_to_drop, backup.words, lane.closed is not None) == (0, "none", True)
    backup.confirm(FIRST, 9)
    assert backup.words == "none", "nothing is believed of a copy that is gone"
    tell(backup)
    backup.settle()
    lane, number = begin(backup, number=4)
    backup.confirm(FIRST, number + 1)
    assert backup.words == "ps:1"


def test_a_copy_that_is_made_holds_nobody_up_for_long(backup: Backup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.ps.backup.SILENCE_S", 0.05)
    monkeypatch.setattr("stratagem.ps.backup.MIN_TOLD_BYTES", 8)
    lane, _ = begin(backup)
    tell(backup)
    later = Waiting(lambda: tell(backup))
    later.returns()
    backup.settle()
    assert (backup.words, lane.closed is not None) == ("none", True)
