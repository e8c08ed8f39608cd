"""Domain errors on the wire: one interceptor turns them into status codes, one function turns them back.

The reason travels as ``ErrorInfo`` (``grpcio-status``), so a client sees the same class that the server raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from stratagem import errors
from stratagem.rpc.logs import THROTTLE, Throttle, shortened

logger = logging.getLogger(__name__)

DOMAIN = "stratagem"
NO_DESCRIPTORS = "it has too many files open; raise `ulimit -n`"
AGAIN_S = 60.0
"""Seconds after which the refusal of a call that is repeated is logged again."""
_REPEATED = Throttle(burst=1, period_s=AGAIN_S)

_CODES: dict[type[errors.StratagemError], int] = {
    errors.LimitError: code_pb2.RESOURCE_EXHAUSTED,
    errors.SequenceError: code_pb2.FAILED_PRECONDITION,
    errors.StaleStoreError: code_pb2.FAILED_PRECONDITION,
    errors.FencedError: code_pb2.PERMISSION_DENIED,
    errors.IdentityError: code_pb2.UNAUTHENTICATED,
    errors.SecurityError: code_pb2.PERMISSION_DENIED,
    errors.ProtocolError: code_pb2.INVALID_ARGUMENT,
    errors.ConfigurationError: code_pb2.INVALID_ARGUMENT,
    errors.VariableError: code_pb2.INVALID_ARGUMENT,
    errors.NonFiniteGradientError: code_pb2.INVALID_ARGUMENT,
    errors.PeerUnavailableError: code_pb2.UNAVAILABLE,
    errors.ClusterTimeoutError: code_pb2.DEADLINE_EXCEEDED,
    errors.JobStoppedError: code_pb2.ABORTED,
    errors.CheckpointError: code_pb2.INTERNAL,
}


def _subclasses(cls: type[errors.StratagemError]) -> Iterator[type[errors.StratagemError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)


_BY_REASON = {cls.reason: cls for cls in _subclasses(errors.StratagemError)}


def status_message(error: errors.StratagemError) -> status_pb2.Status:
    code = next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), code_pb2.INTERNAL)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, errors.JobStoppedError):
        info.metadata["exit_code"] = str(error.exit_code)
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=code, message=_transportable(str(error)), details=[detail])


def failure_message(error: Exception) -> status_pb2.Status:
    """What nobody thought of, as gRPC tells the caller."""
    return status_pb2.Status(code=code_pb2.UNKNOWN, message=_transportable(f"Exception calling application: {error}"))


def _transportable(text: str) -> str:
    """A status travels in metadata, twice, of which gRPC takes 8 KiB; beyond ASCII a character takes up to 18 bytes."""
    return shortened(text, 2000 if text.isascii() else 400)


def error_from_rpc(error: grpc.RpcError, peer: str) -> errors.StratagemError:
    """The error that the server (``peer``) raised; what the transport says becomes ``PeerUnavailableError``."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # what a call raises is the call
    except ValueError:  # it was cancelled here while the server's error was on its way
        status = None
    if status is not None and (known := _known_error(status)) is not None:
        return known
    call: Any = error
    code = call.code()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        which = "message over its max_message_bytes" if "larger than max" in call.details() else "call over max_calls"
        return errors.LimitError(f"{peer} refused a {which}: {call.details()}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        if "Failed parsing HTTP/2" in call.details():
            words = "something that is no task, perhaps the page of a job, answers at the address of"
            return errors.PeerUnavailableError(f"{words} {peer}")
        if "Too many open files" in call.details():  # followed by bytes that are no text
            return errors.PeerUnavailableError(f"this process cannot reach {peer}: {NO_DESCRIPTORS}")
        return errors.PeerUnavailableError(f"{peer} cannot be reached ({code.name}: {call.details()})")
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):  # to a probe: of a service it has not
        return errors.ConfigurationError(
            f"something other than {peer} answers at its address ({call.details() or code.name}): check the "
            "addresses of the cluster (TF_CONFIG, --cluster, --chief, --address), each of which is for one task"
        )
    return errors.StratagemError(f"{peer} failed ({code.name}): {call.details()}")


def error_from_status(status: status_pb2.Status, peer: str) -> errors.StratagemError:
    """The error that :func:`status_message` or :func:`failure_message` made a message of."""
    return _known_error(status) or errors.StratagemError(f"{peer} failed ({status.message})")


def _known_error(status: status_pb2.Status) -> errors.StratagemError | None:
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            cls = _BY_REASON.get(info.reason, errors.StratagemError)
            if cls is errors.JobStoppedError:
                return errors.JobStoppedError(status.message, int(info.metadata["exit_code"]))
            return cls(status.message)
    return None


def log_refusal(method: str, error: errors.StratagemError) -> None:
    """A line about a request that was refused, one in :data:`AGAIN_S` for the same; no warning where the caller asks
    again."""
    name = method.rpartition("/")[2]
    if _REPEATED.admit(f"{name} {error}", time.monotonic()) is None:
        return
    is_asked_again = isinstance(error, errors.PeerUnavailableError | errors.StaleStoreError)
    level = logging.INFO if is_asked_again else logging.WARNING
    THROTTLE.log(logger, level, f"{name} {error.reason}", "%s refused: %s", name, error)


def log_failure(method: str, error: Exception) -> None:
    """A line about what nobody thought of: gRPC tells the caller alone."""
    name = method.rpartition("/")[2]
    THROTTLE.log(logger, logging.ERROR, f"{name} failed", "%s failed", name, exc_info=error)


class Caught:
    """Around a servicer's method: a domain error becomes :attr:`status`, and a log line."""

    def __init__(self, method: str, is_active: Callable[[], bool]) -> None:
        self._method = method
        self._is_active = is_active
        self.status: Any = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, errors.StratagemError):
            log_refusal(self._method, error)
            self.status = rpc_status.to_status(status_message(error))
            return True
        if isinstance(error, Exception) and self._is_active():
            log_failure(self._method, error)
        return False
