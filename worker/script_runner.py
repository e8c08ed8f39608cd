"""Runs a user's training script in this process and turns its end into an exit code and readable words, even an end by
``os._exit``, or by ``sys.exit``, whose code Python does not pass on.

A script that makes no strategy takes no part in its job: it would train alone, in each task.
"""

from __future__ import annotations

import builtins
import dataclasses
import logging
import os
import runpy
import shlex
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stratagem.cluster.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE
from stratagem.errors import CollectiveError, ConfigurationError, ForbiddenError, JobStoppedError, StratagemError
from stratagem.worker.interrupts import Preempted
from stratagem.worker.runtime import active_runtime
from stratagem.worker.step_meter import active_meter

logger = logging.getLogger(__name__)

leave = os._exit
"""As it is without :func:`before_sudden_exit`."""
PATIENCE_S = 10.0
"""Seconds for what is to be done first: who calls ``os._exit`` may do so because something hangs."""

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

_process: int | None = None
"""The one that runs the script of a task."""
_has_stepped = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    exit_code: int
    message: str = ""
    """One paragraph about a failure; empty on success."""
    traceback: str = ""
    """Frames of the user's code only; empty where they would not help."""
    follows: bool = False
    """It failed because another task had."""
    is_over: bool = False
    """The job had ended for this task, which nobody waits for."""


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
        if isinstance(error, ImportError) and "no known parent package" in str(error) and not is_module:
            error.msg += _as_module(script)
        elif _lacks_keyboard(error):
            command = f"python {'-m ' * is_module}{shlex.quote(script)}"
            error.args = (f"nobody types for a task: input() and breakpoint() are for `{command}`, one process",)
        return dataclasses.replace(_of(error), follows=follows(error))
    finally:
        sys.argv, sys.path[:] = argv, path
    return Outcome(EXIT_DONE)


def _lacks_keyboard(error: BaseException) -> bool:
    """Whether it is of the debugger, or of input(), at the end of a standard input that is no terminal."""
    is_of_input = isinstance(error, EOFError) and _text(error) == "EOF when reading a line"
    return (is_of_input or isinstance(error, BdbQuit)) and not os.isatty(0)


def _as_module(script: str) -> str:
    """How a file is run whose relative imports need its package."""
    file = os.path.realpath(script)
    above = os.path.dirname(os.path.dirname(file))
    while os.path.exists(os.path.join(above, "__init__.py")):
        above = os.path.dirname(above)
    name = os.path.splitext(os.path.relpath(file, above))[0].replace(os.sep, ".")
    return f"; in {above}, `-m {name}` instead of the file runs it as part of its package"


def follows(error: BaseException | None) -> bool:
    """Whether another task had failed: behind the error, whatever the script made of it, is one that says so."""
    seen: list[BaseException] = []  # a chain may be a circle
    while error is not None and not isinstance(error, CollectiveError | JobStoppedError):
        seen.append(error)
        error = error.__cause__ or error.__context__
        if any(error is one for one in seen):
            return False
    return error is not None


def _of(error: BaseException) -> Outcome:
    match error:
        case Preempted():
            return Outcome(EXIT_PREEMPTED, error.message)
        case SystemExit(code=None):
            return Outcome(EXIT_DONE)
        case SystemExit(code=int(status)):
            code = exit_code_of(status)
            return Outcome(code, f"the script exited with code {code}" if code else "")
        case SystemExit():
            return Outcome(EXIT_FAILED, _text(error.code))
        case KeyboardInterrupt():
            return Outcome(130, "interrupted")
        case JobStoppedError():
            return Outcome(error.exit_code, str(error), is_over=True)
        case StratagemError():
            code = EXIT_USAGE if isinstance(error, ConfigurationError | ForbiddenError) else EXIT_FAILED
            return Outcome(code, f"{type(error).__name__}: {error}{_place(error.__traceback__)}")
    if uses_torch_distributed():
        sys.last_value = error  # kept too; the process groups tell it to the other ranks
    frames = _script_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Outcome(EXIT_FAILED, words_of(error), text)


def exit_code_of(status: object) -> int:
    """The code of a process that ends by ``sys.exit(status)``: the system keeps the lowest byte of a number."""
    return status & 0xFF if isinstance(status, int) else int(status is not None)


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<its __str__ fails: {type(error).__name__}>"


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
    libraries = (os.path.dirname(os.path.realpath(os.__file__)), "site-packages")
    return any(map(file.startswith, ours)) or any(place in file for place in libraries)


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    runners = (__file__, runpy.run_path.__code__.co_filename)
    while frames is not None and frames.tb_frame.f_code.co_filename in runners:
        frames = frames.tb_next
    return frames


def before_sudden_exit(work: Callable[[int, str], object]) -> None:
    """Runs ``work`` when this process, not a forked child of it, ends by ``os._exit``, unless another was told before.
    ``work`` takes the exit code, and words for one that is not 0."""
    if os._exit is not leave:
        return
    process = os.getpid()

    def exit_now(status: int) -> NoReturn:
        os._exit = leave
        if os.getpid() == process:
            code = exit_code_of(status)
            told = f"the script left by os._exit({status})" if code else ""
            thread = threading.Thread(target=work, args=(code, told), name="sudden-exit", daemon=True)
            thread.start()
            thread.join(PATIENCE_S)
        leave(status)

    os._exit = exit_now


class _Exit(SystemExit):
    """An exception of ``sys.exit``. If it is never caught, Python itself releases it once no function runs any more."""

    uncaught: ClassVar[list[object]] = []
    """The code of that one."""

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            self.uncaught.append(self.code)


def watch_exit() -> Callable[[], tuple[int, str]]:
    """Returns a function for the end of this process: the exit code by which it ends, and words for one that is not 0.

    It sees ``sys.exit``, and ``exit`` and ``quit`` of a script. Of a ``raise SystemExit(3)`` Python tells nobody.
    """

    def leave_by(status: object = None, /) -> NoReturn:
        is_main = threading.current_thread() is threading.main_thread()
        raise (_Exit if is_main else SystemExit)(status)  # of a thread's end threading is silent for that class alone

    sys.exit = leave_by
    if not hasattr(sys, "ps1"):  # where one types, they say how to leave
        for name in ("exit", "quit"):
            setattr(builtins, name, leave_by)

    def told() -> tuple[int, str]:
        status = _Exit.uncaught[-1] if _Exit.uncaught else None
        code = exit_code_of(status)
        return code, f"the script left by sys.exit({status!r})" if code else ""

    return told


def begin_task(num_replicas: int, num_workers: int) -> None:
    """A task's script is about to run in this process.

    In a job of several replicas the first step of an optimizer is an error as long as there is neither a strategy nor
    a process group of ``torch.distributed``; in one of several workers it is warned of with the strategy of a process.
    """
    global _process
    _process = os.getpid()
    if num_replicas > 1:

        def check(*_: Any) -> None:
            if _has_stepped or uses_torch_distributed():
                return
            if awaits_strategy():
                raise ConfigurationError(trains_alone(num_replicas, "and trains"))
            if num_workers > 1 and active_runtime() is None:
                logger.warning(
                    "this job has %d workers, and the strategy that the script has made is of one process: each worker "
                    "trains a model of its own. `strategy = sg.strategy_from_environment()` makes the job's",
                    num_workers,
                )

        register_optimizer_step_pre_hook(check)
    register_optimizer_step_post_hook(_note)


def _note(*_: Any) -> None:
    global _has_stepped
    _has_stepped = True


def has_stepped() -> bool:
    """Whether an optimizer of the script has made a step, wherever it was applied."""
    return _has_stepped


def awaits_strategy() -> bool:
    """Whether this process runs the script of a task, and there has been no strategy in it so far."""
    return _process == os.getpid() and active_meter() is None


def uses_torch_distributed() -> bool:
    """Whether the script has made a process group, which it may have destroyed again: its ranks train together."""
    return dist.is_available() and (dist.is_initialized() or c10d._backend is not None)


def trains_alone(num_replicas: int, what: str) -> str:
    """What a script is told that has made no strategy in a job of several replicas."""
    return (
        f"this job has {num_replicas} replicas, but its script has made no strategy {what}: each task would train a "
        "model of its own. Write `strategy = sg.strategy_from_environment()`, `strategy.prepare(model, optimizer)` and "
        "`strategy.run(step, args=(batch,))`, or train with sg.Model, which finds the job's strategy by itself"
    )
