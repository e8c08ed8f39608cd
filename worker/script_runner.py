"""Runs a user's training script in this process and turns its end into an exit code and words a person can use."""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from stratagem.errors import CollectiveError, ConfigurationError, ForbiddenError, JobStoppedError, StratagemError
from stratagem.worker.interrupts import EXIT_TERMINATED, Preempted
from stratagem.worker.job_script import uses_torch_distributed

EXIT_DONE = 0
EXIT_SCRIPT_FAILED = 1
EXIT_USAGE = 2

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


@dataclasses.dataclass(frozen=True)
class Outcome:
    exit_code: int
    message: str = ""
    """One paragraph about a failure; empty on success."""
    traceback: str = ""
    """Frames of the user's code only; empty where they would not help."""
    follows: bool = False
    """It failed because another task had."""


_kept: list[object] = []
"""What scripts with process groups have left, until the process ends. A model of DDP that goes with gloo's last process
group joins gloo's thread while it holds the GIL, for which that thread may wait: both would stand still for ever. At
the end of the process threads no longer get the GIL, as after a script that Python itself runs."""


def run_script(script: str, arguments: Sequence[str], is_module: bool = False) -> Outcome:
    """Runs ``script``, a file or the name of a module, as ``__main__`` with ``arguments`` in ``sys.argv``.

    A script that raises an error of its own gets its traceback, without the frames of the runner. One of our errors
    gets its message and the line of the script where it happened.
    """
    if not (is_module or os.path.isfile(script)):
        return Outcome(EXIT_USAGE, f"there is no script {script!r}; the working directory is {os.getcwd()}")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(script)))
    try:
        if is_module:
            names = runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            names = runpy.run_path(script, run_name="__main__")
        if uses_torch_distributed():
            _kept.append(names)
    except BaseException as error:
        return dataclasses.replace(_of(error), follows=follows(error))
    finally:
        sys.argv, sys.path[:] = argv, path
    return Outcome(EXIT_DONE)


def follows(error: BaseException | None) -> bool:
    """Whether another task had failed: behind the error, whatever the script made of it, is one that says so."""
    while error is not None and not isinstance(error, CollectiveError | JobStoppedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _of(error: BaseException) -> Outcome:
    match error:
        case Preempted():
            return Outcome(EXIT_TERMINATED, error.message)
        case SystemExit():
            return _of_exit(error)
        case KeyboardInterrupt():
            return Outcome(130, "interrupted")
        case StratagemError():
            return _of_ours(error)
    if uses_torch_distributed():
        _kept.append(error)
    frames = _script_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Outcome(EXIT_SCRIPT_FAILED, f"{type(error).__name__}: {error}", text)


def _of_exit(error: SystemExit) -> Outcome:
    if error.code is None:
        return Outcome(EXIT_DONE)
    if isinstance(error.code, int):
        return Outcome(error.code, "" if error.code == 0 else f"the script exited with code {error.code}")
    return Outcome(EXIT_SCRIPT_FAILED, str(error.code))


def _of_ours(error: StratagemError) -> Outcome:
    if isinstance(error, JobStoppedError):
        return Outcome(error.exit_code, str(error))
    code = EXIT_USAGE if isinstance(error, ConfigurationError | ForbiddenError) else EXIT_SCRIPT_FAILED
    return Outcome(code, f"{type(error).__name__}: {error}{_place(error.__traceback__)}")


def _place(frames: TracebackType | None) -> str:
    """The innermost line that is neither ours nor of an installed library."""
    place = ""
    for frame in traceback.extract_tb(frames):
        file = os.path.realpath(frame.filename)
        if os.path.isfile(file) and not _is_library(file):
            place = f" (at {frame.filename}:{frame.lineno}, in {frame.name})"
    return place


def _is_library(file: str) -> bool:
    ours = (os.path.join(_OUR_FOLDER, name) + os.sep for name in ("stratagem", "worker", "ps", "chief"))
    return (
        any(map(file.startswith, ours))
        or os.path.realpath(os.__file__).rpartition(os.sep)[0] in file
        or ("site-packages" in file)
    )


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    runners = (__file__, runpy.run_path.__code__.co_filename)
    while frames is not None and frames.tb_frame.f_code.co_filename in runners:
        frames = frames.tb_next
    return frames
