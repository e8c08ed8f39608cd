"""``python -m stratagem.launch.submit.background FOLDER``: a local job that outlives its submitter.

The process forks at once and its parent ends, so the job has no parent. It holds a lock on ``FOLDER/alive`` as long as
it lives: the kernel releases it however the process ends, and a reused process id cannot deceive. Its exit code goes to
``FOLDER/exit_code``, its output to ``FOLDER/output.log``.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import traceback
from pathlib import Path

ALIVE, EXIT_CODE, OUTPUT, ORDER = "alive", "exit_code", "output.log", "order.json"
PARTIAL = f"{EXIT_CODE}.partial"


def main(folder: Path) -> int:
    """Runs the job that ``order.json`` describes: arguments of `stratagem run`."""
    lock = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # who looks whether the job lives has it for a moment; the child keeps it
    if os.fork():
        os._exit(0)
    os.setsid()
    os.write(lock, str(os.getpid()).encode())
    _redirect(folder / OUTPUT)
    code = _run(json.loads((folder / ORDER).read_text()))
    (folder / PARTIAL).write_text(str(code))
    os.replace(folder / PARTIAL, folder / EXIT_CODE)
    return code


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    for fd in (nothing, out):
        os.close(fd)


def _run(arguments: list[str]) -> int:
    sys.argv = ["stratagem", "run", *arguments]
    try:
        from stratagem.cli.__main__ import main as stratagem  # after the fork: it takes a second to load

        stratagem()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception:
        traceback.print_exc()  # into the job's output; its exit code says that nobody killed it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
