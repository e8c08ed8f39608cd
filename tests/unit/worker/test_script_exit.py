"""What is known of a script's exit code when its process ends by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from stratagem.worker.script_runner import watch_exit
told = watch_exit()
threading._register_atexit(lambda: print(*told()))
"""
ENDS = {
    "": "0 ",
    "sys.exit()": "0 ",
    "sys.exit(0)": "0 ",
    "sys.exit(3)": "3 the script left by sys.exit(3)",
    "exit(3)": "3 the script left by sys.exit(3)",
    "sys.exit(-1)": "255 the script left by sys.exit(-1)",
    "sys.exit('no data')": "1 the script left by sys.exit('no data')",
    "import contextlib\nwith contextlib.suppress(SystemExit): sys.exit(3)": "0 ",
    "try: sys.exit(5)\nexcept SystemExit as error: kept = error": "0 ",
    "try: 1 / 0\nexcept ZeroDivisionError as error: sys.exit(4)": "4 the script left by sys.exit(4)",
    "import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\nthread.start(); thread.join()": "0 ",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_code_of_an_exit_that_nobody_caught_is_known(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=60)
    assert done.stdout.rstrip("\n") == ENDS[end], done.stderr
    assert done.stderr == ("no data\n" if "no data" in end else "")
    assert done.returncode == int(ENDS[end].split()[0])
