"""One question to one task, over a channel of its own: for commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from stratagem.errors import IdentityError, PeerUnavailableError
from stratagem.rpc.channels import connect
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.security import Security


@contextlib.contextmanager
def asking(address: str, task: str, security: Security, words: str) -> Iterator[grpc.Channel]:
    """A channel to ``task`` for the ``with`` block; what goes wrong in it is raised as an error of ours. ``address``:
    host:port; ``words``: the task, in the error.

    Raises:
        IdentityError: TLS does not come about, or the task does not know us.
        PeerUnavailableError: it does not answer.
    """
    channel = connect(address, task, security)
    try:
        yield channel
    except grpc.RpcError as error:
        found = error_from_rpc(error, words)
        if isinstance(found, PeerUnavailableError) and (reason := explain_refusal(address, task, security)):
            raise IdentityError(reason) from None
        raise found from None
    finally:
        channel.close()
