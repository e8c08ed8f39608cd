"""Where a task looks for its chief."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.errors import ClusterSpecError
from stratagem.rpc.chief_address import NOWHERE, ChiefAddress, write_chief_address


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
        write_chief_address(str(tmp_path), address)
        where.turn()
        assert where.candidates == [where.current] == [address]


@pytest.mark.parametrize("said", ["", "a", "a:1,", "a:b", "a:1;b:2"])
def test_what_is_no_address_is_refused(said: str) -> None:
    with pytest.raises(ClusterSpecError, match="expected an address like"):
        ChiefAddress(said)
