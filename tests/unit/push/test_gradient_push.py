"""A commit to a ps that goes away, comes back and goes away again."""

from __future__ import annotations

from typing import Any
from unittest import mock

from stratagem.errors import PeerUnavailableError
from stratagem.worker.push.gradient_push import GradientPush
from stratagem.worker.step_meter import StepMeter


def test_a_ps_that_goes_away_while_frames_are_sent_again_is_waited_for_once_more() -> None:
    away = PeerUnavailableError("it is away")
    client = mock.Mock(start=mock.Mock(side_effect=away), restart=mock.Mock(return_value="call"))
    push: Any = object.__new__(GradientPush)
    push._servers, push._clients, push._calls, push._corked = [0], {0: client}, {}, []
    push._slice = None
    push._meter, push._recover = StepMeter(), mock.Mock()
    push.staging = mock.Mock(restage=mock.Mock(side_effect=[away, mock.Mock()]))
    finished: list[Any] = []
    push._on_all("CommitUpdate", mock.Mock(), lambda ps, call: finished.append((ps, call)))
    assert push._recover.call_count == 2 and finished == [(0, "call")]
