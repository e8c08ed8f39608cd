"""What is known of a script's exit code when its process ends by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forks import run

SCRIPT = """
import sys, threading
from stratagem.worker.script_runner import watch_exit
told = watch_exit()
threading._register_atexit(lambda: print(*told()))
"""
pytestmark = pytest.mark.usefixtures("preloaded")
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
    done = run([sys.executable, "-c", SCRIPT + end], timeout=60)
    assert done.stdout.rstrip("\n") == ENDS[end], done.stderr
    assert done.stderr == ("no data\n" if "no data" in end else "")
    assert done.returncode == int(ENDS[end].split()[0])


@pytest.mark.parametrize(("status", "code"), [(-1, 255), (256, 0)])
def test_the_code_of_a_sudden_exit_is_known(status: int, code: int) -> None:
    imports = "import os\nfrom stratagem.worker.script_runner import before_sudden_exit\n"
    script = f"before_sudden_exit(lambda *told: print(*told, flush=True))\nos._exit({status})"
    done = run([sys.executable, "-c", imports + script], timeout=60)
    assert done.returncode == code
    assert done.stdout.strip() == (f"{code} the script left by os._exit({status})" if code else "0"), done.stderr


def test_an_error_that_has_no_words_is_a_failure_of_a_script_that_python_runs() -> None:
    script = """
from types import SimpleNamespace
from stratagem.strategy.roles import say_goodbye_at_exit
say_goodbye_at_exit(SimpleNamespace(goodbye=lambda *told: print(*told, flush=True)))
class Odd(Exception):
    def __str__(self): raise KeyError
raise Odd
"""
    done = run([sys.executable, "-c", script], timeout=60)
    assert (done.returncode, done.stdout) == (1, "1 Odd: <its __str__ fails: KeyError> False\n"), done.stderr


@pytest.mark.parametrize("end", ["", "1 / 0"])
@pytest.mark.parametrize(
    "taken",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "os.close(1); os.close(2); sys.stdout = None",
    ],
)
def test_a_script_may_close_its_outputs(tmp_path: Path, taken: str, end: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os, sys\n{taken}\n{end}\n")
    run_it = (
        "import sys\nfrom stratagem.cluster.config import WorkerConfig\nfrom stratagem.worker.__main__ import run\n"
    )
    run_it += f"sys.exit(run(WorkerConfig(task='worker:0'), {str(script)!r}, []))"
    done = run([sys.executable, "-c", run_it], timeout=60)
    assert done.returncode == bool(end), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == bool(end and "close(2)" not in taken), done.stderr
