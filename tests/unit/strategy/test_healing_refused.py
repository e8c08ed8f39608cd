"""What a ring that goes on without lost workers cannot do is refused when the strategy is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stratagem.errors import ConfigurationError
from stratagem.strategy.multi_worker_mirrored import refuse_what_does_not_heal

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "compression", "group", "named"),
    [
        ([CPU, CPU], None, "shm", "2 devices in a worker"),
        ([CPU], "int8", "ring over tcp", "compression='int8'"),
        ([CPU], None, "nccl", "NCCL"),
    ],
)
def test_is_refused_by_name(devices: Any, compression: Any, group: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"\(--min-workers\) cannot have {named}: leave out that"):
        refuse_what_does_not_heal(devices, compression, group)


def test_what_heals_is_not_refused() -> None:
    for group in ("shm", "ring over tcp", "ring over grpc"):
        refuse_what_does_not_heal([CPU], None, group)
