"""``python -m stratagem.chief --config-json '{"num_workers": 2}'``: the chief as its own process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from stratagem.checkpoint.durable import replace_text, way_out
from stratagem.checkpoint.ended import take_end
from stratagem.chief.job import ChiefJob
from stratagem.chief.journal.journal import exit_code_of
from stratagem.chief.journal.lock import CheckpointsLock, JournalLock
from stratagem.chief.servicer import SERVICE, ChiefServicer
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.spec import split_address
from stratagem.errors import ConfigurationError, JournalLostError, StratagemError
from stratagem.rpc.binding import ANY_HOST, told_address
from stratagem.rpc.chief_address import FILE_NAME
from stratagem.rpc.generated import chief_pb2_grpc
from stratagem.rpc.logs import configure_logging
from stratagem.rpc.security import Security, security_of
from stratagem.rpc.server import serve_aio

if TYPE_CHECKING:
    from stratagem.chief.web.http_server import HttpServer

_ENDINGS = (signal.SIGTERM, signal.SIGINT)
logger = logging.getLogger("stratagem.chief")  # not __name__: that is "__main__" under python -m


def run(config: ChiefConfig, *, print_address: bool = False, until_eof: bool = False) -> int:
    """Serves until the job ends; returns its exit code. ``print_address``: print the host:port really bound on stdout,
    one line; ``until_eof``: stop when standard input ends: it is a pipe from the process that started this one. Raises
    ConfigurationError: the port is taken, or the journal cannot be read or is that of a chief that runs."""
    return asyncio.run(serve(config, print_address=print_address, until_eof=until_eof, owns_process=True))


async def serve(
    config: ChiefConfig, *, print_address: bool = False, until_eof: bool = False, owns_process: bool = False
) -> int:
    """As :func:`run`, inside an event loop, in a process that may be somebody else's too."""
    security = security_of(config)
    told = asyncio.Event()  # by a signal, that must not be lost before the job hears of signals itself
    for number in _ENDINGS:
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    with contextlib.ExitStack() as held:
        if config.state_dir:
            with _kept_in(config.state_dir):
                journal_lock = JournalLock(config.state_dir)
                held.callback(journal_lock.release)
                has_waited = await _wait(journal_lock, config.standby, told)
            if has_waited is None:
                logger.info("Shut down by a signal%s", " while standing by" if config.standby else "")
                return EXIT_PREEMPTED
            code = exit_code_of(config.state_dir)
            if has_waited and config.standby and code is not None:
                logger.info("The job that this standby chief watched is over, with exit code %d", code)
                return code
            if code == 0 and (end := take_end(config.checkpoint_dir, config.task)) is not None:
                logger.info("The job is over: %s", end)
                return 0
        # Where there are no locks, or nothing can be written, saving will say so.
        with contextlib.suppress(OSError):
            if config.checkpoint_dir:
                lock = CheckpointsLock(config.checkpoint_dir)
                held.callback(lock.release)
                if await _wait(lock, False, told) is None:
                    return EXIT_PREEMPTED
        job = ChiefJob(config, security)
        held.callback(job.close)
        if owns_process:
            held.callback(asyncio.create_task(_freeze(job)).cancel)
        return await _serve(config, job, security, told, print_address=print_address, until_eof=until_eof)


@contextlib.contextmanager
def _kept_in(state_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = way_out(error, "give the chief a --state-dir that it can write to")
        raise JournalLostError(f"cannot keep the journal in {state_dir}: {error.strerror}; {advice}") from None


async def _wait(lock: JournalLock, standby: bool, told: asyncio.Event) -> bool | None:
    """As :meth:`JournalLock.wait`; None: a signal came first."""
    waiting, signalled = asyncio.ensure_future(lock.wait(standby)), asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait([waiting, signalled], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (waiting, signalled):
            each.cancel()
    return waiting.result() if waiting.done() else None


async def _freeze(job: ChiefJob) -> None:
    """Once all are here their sessions stay: to look through those of 1,000 workers for garbage, again and again, kept
    everybody waiting for up to 0.16 s."""
    while not job.sessions.ready:
        await job.changed.wait()
    gc.freeze()


async def _serve(
    config: ChiefConfig,
    job: ChiefJob,
    security: Security,
    told: asyncio.Event,
    *,
    print_address: bool,
    until_eof: bool,
) -> int:
    server = await serve_aio(
        config,
        lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(ChiefServicer(job), server),
        services=[SERVICE],
        security=security,
    )
    async with contextlib.AsyncExitStack() as servers:
        servers.push_async_callback(server.stop)
        loop = asyncio.get_running_loop()
        for number, end in zip(_ENDINGS, (job.leave, job.stop), strict=True):
            loop.add_signal_handler(number, end, EXIT_PREEMPTED, f"the chief got {signal.Signals(number).name}")
        if told.is_set():
            return EXIT_PREEMPTED
        job.address = told_address(config.advertise, server.address)
        if config.state_dir:
            with _kept_in(config.state_dir):
                replace_text(Path(config.state_dir, FILE_NAME), job.address + "\n")
            if split_address(job.address)[0] in ANY_HOST:
                logger.warning(
                    "%s in %s says %s, which other machines cannot use: if tasks there find the chief by "
                    "that file, give --advertise host:port",
                    *(FILE_NAME, config.state_dir, job.address),
                )
        logger.info("%s listening on %s%s", config.task, server.address, security.words)
        if print_address:
            print(server.address, flush=True)
        if until_eof:
            loop.add_reader(sys.stdin.fileno(), _on_input, job)
        for serve_http in _http_servers(config):
            servers.push_async_callback(serve_http(config, job, security).stop)
        await server.set_serving(True)
        return await job.run()


def _http_servers(config: ChiefConfig) -> Iterator[Callable[[ChiefConfig, ChiefJob, Security], HttpServer]]:
    """What serves over HTTP; loaded when it is asked for, and only then needed."""
    for field, extra, packages in (
        ("metrics_bind", "metrics", ("prometheus_client", "aiohttp")),
        ("web", "web", ("aiohttp",)),
    ):
        if not getattr(config, field):
            continue
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigurationError(
                f"{field} needs {' and '.join(missing)}, which is not installed here: pip install 'stratagem[{extra}]'"
            )
        serving = importlib.import_module("stratagem.chief.web.serving")
        yield serving.serve_metrics if field == "metrics_bind" else serving.serve_page


def _on_input(job: ChiefJob) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        job.stop(1, f"the worker that started the chief has ended{job.sessions.first_failure_words}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The process that worker 0 starts when the cluster has no chief of its own."""
    parser = argparse.ArgumentParser(prog="python -m stratagem.chief", description=__doc__)
    parser.add_argument("--config-json", required=True, help="ChiefConfig as JSON")
    parser.add_argument("--print-address", action="store_true", help="print the bound host:port on stdout")
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input ends")
    parsed = parser.parse_args(arguments)
    try:
        config = ChiefConfig.model_validate_json(parsed.config_json)
        configure_logging(config.task, config.log_format)
        return run(config, print_address=parsed.print_address, until_eof=parsed.until_eof)
    except (ConfigurationError, pydantic.ValidationError) as error:
        print(f"chief: {error}", file=sys.stderr)
        return 2
    except StratagemError as error:
        print(f"chief: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
