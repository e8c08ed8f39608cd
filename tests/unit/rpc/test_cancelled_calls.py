"""A call that is cancelled here while the server's error arrives is a call that was cancelled."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import code_pb2, status_pb2

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.errors import error_from_rpc


class Cancelled(grpc.RpcError):
    """As gRPC leaves such a call: its own code, and the trailing metadata of the server's."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "Locally cancelled by application!"

    def trailing_metadata(self) -> Any:
        status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="fenced")
        return (("grpc-status-details-bin", status.SerializeToString()),)


def test_a_cancelled_call_with_another_status_in_its_metadata() -> None:
    error = error_from_rpc(Cancelled(), "ps:0")
    assert isinstance(error, PeerUnavailableError)
    assert "Locally cancelled" in str(error)
