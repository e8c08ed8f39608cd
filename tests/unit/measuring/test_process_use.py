"""What a process takes of its machine."""

from __future__ import annotations

import pytest

from stratagem.measuring import measures, process_use
from stratagem.measuring.process_use import ProcessUse


def test_a_thread_with_the_id_of_one_that_has_ended_counts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{7: (0, 100)}, {}, {7: (0, 60)}])
    monkeypatch.setattr(process_use, "_threads", lambda: next(looks))
    monkeypatch.setattr(process_use, "EVERY_S", 0.0)
    use = ProcessUse()
    assert [round(use.values()[measures.STARVED] * 1e9) for _ in range(3)] == [100, 100, 160]
