"""First thing in every child process: ask the kernel to kill it when the launcher dies, hear Ctrl-C, then become the
command.

Run as a file, not as a module, so it starts in milliseconds and imports nothing of the package. ``python child.py
LAUNCHER_PID COMMAND ARGS…``. Linux only: PR_SET_PDEATHSIG survives exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != launcher_pid:  # it died before the signal was armed
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where a shell script has started the launcher with "&"
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
