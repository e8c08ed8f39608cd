"""With TLS, nothing travels by NCCL, which does not encrypt, unless the user says that it may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions
from stratagem.errors import ConfigurationError
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.tls_files import TlsFiles
from stratagem.worker.ring.ring_member import RingMember

NCCL = CommunicationOptions(implementation=CommunicationImplementation.NCCL)


class _WentOnError(Exception):
    """The ring goes on to form."""


def form(security: Security, options: CommunicationOptions) -> None:
    def wait_ready(timeout_s: float) -> None:
        raise _WentOnError

    session: Any = SimpleNamespace(security=security, on_membership=lambda callback: None, wait_ready=wait_ready)
    RingMember(cast(Any, SimpleNamespace()), session, BytesMeter()).form(options, torch.device("cpu"), 1.0)


@pytest.mark.parametrize("options", [NCCL, CommunicationOptions(transport="nccl")])
def test_nccl_is_refused_with_tls(options: CommunicationOptions) -> None:
    files = TlsFiles("certs", "worker:0")
    with pytest.raises(ConfigurationError, match=r"NCCL does not encrypt.*--insecure"):
        form(Security("worker:0", files), options)
    for allowed in (OPEN, Security("worker:0", files, insecure=True)):
        with pytest.raises(_WentOnError):
            form(allowed, options)


def test_other_lanes_are_not() -> None:
    with pytest.raises(_WentOnError):
        form(Security("worker:0", TlsFiles("certs", "worker:0")), CommunicationOptions(transport="tcp"))
