"""Who sees the package's log: a person who configured nothing; else whoever was configured to, once."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest

from stratagem.errors import ConfigurationError, StaleStoreError
from stratagem.rpc import errors
from stratagem.rpc.errors import Caught
from stratagem.rpc.logs import Throttle
from tests import forks

own_python = functools.partial(subprocess.run, capture_output=True, text=True, timeout=240)

SAY = """
import logging, sys
log = logging.getLogger("stratagem.training.callbacks")
def say(number):
    log.info("info %d", number)
    log.warning("warning %d", number)
"""


def lines_of(script: str, run: Callable[..., subprocess.CompletedProcess[str]] = own_python) -> list[str]:
    """What a script of its own process writes on stderr, without the time."""
    done = run([sys.executable, "-c", SAY + script])
    assert done.returncode == 0, done.stderr
    return [line.partition(" ")[2] if line[:1].isdigit() else line for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ("import stratagem\nsay(1)", ["I stratagem: info 1", "W stratagem: warning 1"]),
        ("say(1)\nimport stratagem", ["warning 1"]),  # as Python does it
        (
            "import stratagem\nfrom stratagem.rpc.logs import PACKAGE, LogTail\nPACKAGE.addHandler(LogTail())\nsay(1)",
            ["I stratagem: info 1", "W stratagem: warning 1"],
        ),
        ("logging.basicConfig()\nimport stratagem\nsay(1)", ["WARNING:stratagem.training.callbacks:warning 1"]),
        (
            "import stratagem\nsay(1)\nlogging.basicConfig(level=logging.INFO, format='%(message)s')\nsay(2)",
            ["I stratagem: info 1", "W stratagem: warning 1", "info 2", "warning 2"],
        ),
        (
            "import stratagem\nlogging.basicConfig(format='%(message)s')\nsay(1)\n"
            "logging.getLogger('stratagem').setLevel(logging.INFO)\nsay(2)",
            ["warning 1", "info 2", "warning 2"],
        ),
        (
            "import stratagem\nlogging.basicConfig(format='%(message)s')\nlog.setLevel(logging.INFO)\nsay(1)",
            ["info 1", "warning 1"],
        ),
        ("import stratagem\nlogging.getLogger('stratagem').setLevel(logging.ERROR)\nsay(1)", []),
        (
            "import stratagem\nlogging.getLogger('stratagem').addHandler(logging.StreamHandler(sys.stderr))\nsay(1)",
            ["info 1", "warning 1"],
        ),
        (
            "logging.getLogger('stratagem').addHandler(logging.StreamHandler(sys.stderr))\nimport stratagem\nsay(1)",
            ["warning 1"],
        ),
        (
            "import stratagem\nfrom stratagem.rpc.logs import configure_logging, show_until_configured\n"
            "configure_logging('worker:1')\nshow_until_configured('worker:1')\nsay(1)",
            ["I worker:1: info 1", "W worker:1: warning 1"],
        ),
        (
            "import stratagem\nfrom stratagem.rpc.logs import show_until_configured\n"
            "show_until_configured('worker:1')\nsay(1)",
            ["I worker:1: info 1", "W worker:1: warning 1"],
        ),
    ],
)
def test_who_sees_what(script: str, seen: list[str]) -> None:
    assert lines_of(script) == seen


TRAIN = """
import stratagem as sg, torch
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    model = sg.Model(torch.nn.Linear(2, 1))
    model.compile(optimizer="SGD", loss="mse")
rates = sg.callbacks.LearningRateScheduler(lambda epoch: 0.1, verbose=1)
model.fit(torch.ones(8, 2), torch.ones(8, 1), batch_size=4, verbose=0, callbacks=[rates])
"""


@pytest.mark.usefixtures("preloaded")
@pytest.mark.thorough
def test_a_plain_script_shows_what_it_does() -> None:
    assert lines_of(TRAIN, functools.partial(forks.run, timeout=240)) == [
        "I stratagem: MirroredStrategy on cpu:0, cpu:1",
        "I stratagem: epoch 1: learning rate 0.1",
        "I stratagem: Reduce to cpu:0 then broadcast to ('cpu:0', 'cpu:1')",
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_is_bounded_whatever_it_quotes(form: str) -> None:
    say = "import stratagem\nfrom stratagem.rpc.logs import configure_logging\n"
    (line,) = lines_of(f"{say}configure_logging('ps:0', {form!r})\nlog.warning('refused: %s!', 'x' * 10**6)")
    assert "refused: x" in line and "x!" in line and "992,010 characters" in line and len(line) < 9000


def test_a_refusal_is_logged_once_and_is_no_warning_where_the_caller_asks_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(errors, "_REPEATED", Throttle(1, errors.AGAIN_S))
    refusals = [ConfigurationError("'worker:7' is no task"), StaleStoreError("begins from step 7")]
    for error in (*refusals, *refusals):
        with Caught("/stratagem.Chief/Session", lambda: True) as caught:
            raise error
        assert caught.status.details == str(error)
    assert caplog.record_tuples == [
        ("stratagem.rpc.errors", logging.WARNING, "Session refused: 'worker:7' is no task"),
        ("stratagem.rpc.errors", logging.INFO, "Session refused: begins from step 7"),
    ]
