"""A commit to a ps that goes away, comes back and goes away again."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import torch

from stratagem.cluster.units import Update
from stratagem.errors import PeerUnavailableError
from stratagem.worker.push.gradient_push import GradientPush
from stratagem.worker.push.row_reads import Lookup, RowReads
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


def test_a_step_without_a_gradient_forgets_the_rows_that_were_read_ahead() -> None:
    """At staleness 0 the others had one, and those rows are of before."""
    push: Any = object.__new__(GradientPush)
    push._variables, push._tables, push.parameters = mock.Mock(), [], [torch.nn.Parameter(torch.zeros(1))]
    push._reads = RowReads(threading.RLock())
    push._reads._ready = [(mock.Mock(num_wasted=0), mock.Mock(spec=Lookup))]
    assert not push.push(mock.Mock(spec=Update), None) and not push._reads._ready
