"""``python -m stratagem.ps``: one parameter server, from start to exit code."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pydantic
import torch

from stratagem.checkpoint.ended import take_end
from stratagem.cluster.config import PsConfig
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError
from stratagem.ps import optimizers
from stratagem.ps.servicer import SERVICE, ParameterServerServicer
from stratagem.ps.socket_lanes import SocketLanes
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.rpc.binding import advertised_address
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.heap import keep_freed_memory
from stratagem.rpc.limits import ServerLimits
from stratagem.rpc.logs import configure_logging
from stratagem.rpc.security import Security, security_of
from stratagem.rpc.segment import free_bytes
from stratagem.rpc.server import RunningServer, add_servicer, serve
from stratagem.rpc.session import SessionClient

logger = logging.getLogger("stratagem.ps")  # __name__ is "__main__" when this is the command

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_TERMINATED = 143


class _Terminated(BaseException):
    """SIGTERM or SIGINT came."""


def run(config: PsConfig) -> int:
    """Serves until the chief stops the job or a signal comes.

    Listens first, then joins; ready means that the chief has registered it and put it back to a checkpoint, if any.

    Args:
        config: of this ps.

    Returns:
        The exit code: the job's when the chief stopped it, 1 after a failure, 2 for a configuration that cannot
        work, 143 after SIGTERM or SIGINT.
    """
    try:
        with _signals_raise():
            return _run(config)
    except _Terminated:
        logger.info("Ended by a signal")
        return EXIT_TERMINATED
    except ConfigurationError as error:
        logger.error("%s", error)
        return EXIT_CONFIGURATION
    except StratagemError as error:
        logger.error("%s", error)
        return EXIT_FAILED


def _run(config: PsConfig) -> int:
    if not config.chief:
        raise ConfigurationError(f"{config.task} must know its chief: set chief to its host:port")
    security = security_of(config)
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    free = config.max_store_bytes or free_bytes() or Limits.max_store_bytes
    limits = Limits(
        config.max_variables,
        free,
        config.max_peer_bytes,
        config.max_peers,
        config.max_message_bytes,
        config.max_ids_per_request,
    )
    folders = AllowedFolders.of(config.checkpoint_dir, config.checkpoint_roots)
    store = Store(config.task, TaskId.parse(config.task).index, limits, folders=folders)
    lanes = SocketLanes(store, config.bind.rpartition(":")[0].strip("[]"), security, config.max_lanes_per_peer)
    server = _serve(config, store, lanes, security)
    try:
        logger.info("Listening on %s%s", server.address, security.words)
        optimizers.warm_up()
        return _stay(config, store, server, security)
    finally:
        store.state.close_lanes(JobStoppedError(f"{config.task} ends", 0))
        lanes.close()
        server.stop(1.0)


def _serve(config: PsConfig, store: Store, lanes: SocketLanes, security: Security) -> RunningServer:
    servicer = ParameterServerServicer(store, lanes, config.max_message_bytes)
    return serve(
        config.bind,
        lambda server: add_servicer(SERVICE, servicer, server),
        services=[SERVICE.full_name],
        limits=ServerLimits.of(config),
        insecure=config.insecure,
        security=security,
    )


def _stay(config: PsConfig, store: Store, server: RunningServer, security: Security) -> int:
    session = SessionClient(
        config.chief,
        config.task,
        advertised_address(config.advertise, server.address),
        progress=lambda: _progress(store),
        store_epoch=lambda: store.state.store_epoch if store.state.initialized else 0,
        chief_timeout_s=config.peer_timeout_s,
        security=security,
    )

    def note_ready(membership: chief_pb2.Membership) -> None:
        if any(info.task == config.task and info.live for info in membership.tasks):
            store.incarnation = session.incarnation
            server.set_serving(True)

    session.on_membership(note_ready)
    try:
        session.start(config.start_timeout_s, lambda: take_end(config.checkpoint_dir, config.task))
        stopped = session.wait_stopped(None)
        assert stopped is not None
        raise stopped
    except JobStoppedError as stopped:
        logger.info("The job is over: %s", stopped)
        if stopped.exit_code == 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a pod that is deleted now has ended well
        if session.incarnation:
            session.goodbye(0)
        return stopped.exit_code
    except _Terminated:
        session.goodbye(EXIT_TERMINATED, f"{config.task} was ended by a signal")
        raise
    finally:
        session.close()


def _progress(store: Store) -> chief_pb2.Progress:
    state = store.state
    return chief_pb2.Progress(step=state.step, store_epoch=state.store_epoch, bytes_held=state.num_bytes)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """In the main thread, turns SIGTERM and SIGINT into an exception; elsewhere the caller owns the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: one flag per field of :class:`PsConfig`, in kebab case."""
    parser = argparse.ArgumentParser(prog="python -m stratagem.ps", description=PsConfig.__doc__)
    for name, field in PsConfig.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=field.description)
        else:
            kinds: dict[Any, Callable[[str], Any]] = {int: int, float: float}
            kind = kinds.get(field.annotation, str)
            parser.add_argument(flag, type=kind, required=field.is_required(), help=field.description)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        config = PsConfig(**given)
    except pydantic.ValidationError as error:
        parser.error(str(error))
    configure_logging(config.task, config.log_format)
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
