"""Every error that Stratagem raises on purpose.

    StratagemError
    ├── ConfigurationError            what the user wrote cannot work (exit code 2)
    │   ├── ClusterSpecError          TF_CONFIG, cluster file or flags describe no valid cluster
    │   └── UnsupportedOptimizerError an optimizer that a ps cannot run
    ├── VariableError                 a variable is unknown, or has another shape or dtype than expected
    ├── NonFiniteGradientError        NaN or Inf in a gradient, under the policy "error"
    ├── ProtocolError                 a peer broke the rules of the wire (bad frame, sequence gap, too large)
    │   ├── FrameError                a payload frame that cannot be what it says
    │   ├── SequenceError             a request out of sequence; names the expected number
    │   └── LimitError                a request over a limit; names the limit
    ├── StaleStoreError               the ps went back to a checkpoint; the sender must introduce itself again
    ├── FencedError                   this incarnation has been declared dead; it must end
    ├── SecurityError                 a peer is not who it must be, or may not do what it asks
    │   ├── IdentityError             no identity, a wrong token, another one's certificate, a refused TLS handshake
    │   └── ForbiddenError            known, but its role may not do this
    ├── PeerUnavailableError          a peer did not answer in time; names the peer
    │   └── JournalLostError          a chief that may not write its journal any more; the next one is to be asked
    ├── CollectiveError               a collective was aborted; names the peer and where everybody was
    ├── SegmentError                  memory shared by processes of one host cannot be had; says how much and why
    ├── ClusterTimeoutError           the cluster did not come up in time; names who is missing
    ├── JobStoppedError               the chief ended the job; carries the exit code
    ├── CheckpointError               a checkpoint cannot be written or read
    │   └── UnreadableError           its disk does not answer, or may not be read
    ├── SubmitError                   a job cannot be submitted: Docker, the registry or the cluster refused it
    └── ExportError                   a model cannot be exported, or what was exported cannot be loaded

A message says what was expected, what came, and what to do next.
"""

from __future__ import annotations

import re
from typing import Any

from stratagem.tensorflow_names import no_attribute


class StratagemError(Exception):
    """Base of all errors raised on purpose. ``reason`` is the error's name on the wire: ``"JOURNAL_LOST"``."""

    reason = "INTERNAL"

    def __init_subclass__(cls) -> None:
        cls.reason = re.sub(r"\B(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).upper()


class ConfigurationError(StratagemError, ValueError):
    """What the user wrote cannot work. Ends a command with exit code 2."""


class ClusterSpecError(ConfigurationError):
    """The description of the cluster is invalid."""


class VariableError(StratagemError):
    """A variable is unknown, or its shape or dtype is not the expected one."""


class UnsupportedOptimizerError(ConfigurationError):
    """The parameter server cannot run this optimizer."""


class NonFiniteGradientError(StratagemError):
    """A gradient, or an Estimator's loss, holds NaN or Inf and the policy is ``"error"``."""


class ProtocolError(StratagemError):
    """A peer broke the rules of the wire."""


class FrameError(ProtocolError):
    """A payload frame cannot be what it says."""


class SequenceError(ProtocolError):
    """A request came out of sequence."""


class LimitError(ProtocolError):
    """A request is over a limit."""


class StaleStoreError(StratagemError):
    """The parameter server went back to a checkpoint since the sender last spoke to it."""


class FencedError(StratagemError):
    """This incarnation has been declared dead by the chief."""


class SecurityError(StratagemError):
    """A peer is not the one expected, or may not do what it asks."""


class IdentityError(SecurityError):
    """Somebody did not prove who it is, or is somebody else."""


class ForbiddenError(SecurityError):
    """The caller is known, and its role may not do this."""


class PeerUnavailableError(StratagemError):
    """A peer did not answer in time."""


class JournalLostError(PeerUnavailableError):
    """A chief cannot write its journal any more, or another one does: it acknowledges nothing, and the next one is to
    be asked."""


class CollectiveError(StratagemError, RuntimeError):
    """A collective was aborted on every rank; no rank has its result. A RuntimeError, like torch's own errors of
    collectives.

    Args:
        message: which peer, why, and at which step.
        rank: the peer, if known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SegmentError(StratagemError):
    """Memory shared by processes of one host cannot be had; another lane has to do. ``errno``: the system's number for
    the cause; 0 where there is none."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class ClusterTimeoutError(StratagemError):
    """The cluster did not come up in time."""


class JobStoppedError(StratagemError):
    """The chief ended the job.

    Args:
        message: the reason.
        exit_code: the code with which this process should exit.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CheckpointError(StratagemError):
    """A checkpoint cannot be written or read."""


class UnreadableError(CheckpointError):
    """A disk does not answer, or may not be read: that says nothing of what lies there, and may pass."""


class SubmitError(StratagemError):
    """A job cannot be submitted, or is not found; carries what Docker, the registry or the cluster said."""


class ExportError(StratagemError):
    """A model cannot be exported, or an export cannot be loaded; says why, and what is there instead."""


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __name__)
