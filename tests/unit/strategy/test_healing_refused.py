"""What a ring that goes on without lost workers cannot do is refused when the strategy is made."""

from __future__ import annotations

import pytest

from stratagem.cluster.job_rules import check_healing
from stratagem.errors import ConfigurationError


@pytest.mark.parametrize(
    ("num_devices", "compression", "is_nccl", "named"),
    [
        (2, None, False, "2 devices in a worker"),
        (1, "int8", False, "compression='int8'"),
        (1, None, True, "NCCL"),
    ],
)
def test_is_refused_by_name(num_devices: int, compression: str | None, is_nccl: bool, named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"\(--min-workers\) cannot have {named}: leave out that"):
        check_healing(num_devices, compression, is_nccl)


def test_what_heals_is_not_refused() -> None:
    check_healing(1, None, is_nccl=False)
    check_healing(1, "", is_nccl=False)
