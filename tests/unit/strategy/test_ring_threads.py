"""A ring and the threads of a script: taking a batch and training with it are collectives of one order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.step_meter import StepMeter


def test_batches_that_another_thread_takes_are_refused() -> None:
    ring = Communicator(HostGroup(0, 1, {}, timeout_s=30.0), lambda error, _: error)
    strategy = SynchronousStrategy((torch.device("cpu"),), StepMeter(), workers=ring)
    data = strategy.distribute_dataset(list(torch.arange(8.0).split(2)))
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.extend(data))
    thread.start()
    thread.join()
    with pytest.raises(sg.ConfigurationError, match="Take batches in the thread that trains"):
        strategy.run(torch.sum, args=(taken[0],))
    for batch in data:
        strategy.run(torch.sum, args=(batch,))
    strategy.close()
    ring.close()
