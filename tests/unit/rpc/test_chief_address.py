"""Where a task looks for its chief."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratagem.errors import ClusterSpecError
from stratagem.rpc.chief_address import FILE_NAME, NOWHERE, ChiefAddress


def test_several_take_turns() -> None:
    where = ChiefAddress("a:1, b:2")
    seen = []
    for _ in range(3):
        seen.append(where.current)
        where.turn()
    assert seen == ["a:1", "b:2", "a:1"]


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    where = ChiefAddress(f"file:{tmp_path}/chief.address")
    assert where.current == NOWHERE
    for address in ("a:1", "b:2"):
        (tmp_path / FILE_NAME).write_text(address + "\n")
        where.turn()
        assert where.candidates == [where.current] == [address]


def test_a_long_file_which_may_have_no_end_is_not_read_to_it() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"\0" * 60_000)
    os.close(writes)
    assert ChiefAddress(f"file:/dev/fd/{reads}").current == NOWHERE
    assert os.read(reads, 1)
    os.close(reads)


@pytest.mark.parametrize("said", ["", "a", "a:1,", "a:b", "a:1;b:2"])
def test_what_is_no_address_is_refused(said: str) -> None:
    with pytest.raises(ClusterSpecError, match="expected an address like"):
        ChiefAddress(said)
