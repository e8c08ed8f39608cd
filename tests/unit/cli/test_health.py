"""`stratagem health` against real servers: exit codes, words, where it finds the task."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pytest

from stratagem.cli.health import address_to_ask, health_command
from stratagem.cluster.config import ChiefConfig, RoleConfig
from stratagem.cluster.sources import gather
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.launch.certificates import make_throw_away
from stratagem.rpc.security import Security, make_security
from stratagem.rpc.server import RunningServer, serve

TOKEN = "a-token-of-the-job-0123456789"


def listen(security: Security | None = None) -> RunningServer:
    return serve(
        ChiefConfig(num_workers=1, max_calls=8),
        lambda server: None,
        services=["stratagem.Chief"],
        security=security or Security(),
    )


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = listen()
    yield running
    running.stop(0)


def health(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code and words; an error counts as :func:`stratagem.cli.__main__.main` counts it."""
    done = click.testing.CliRunner().invoke(health_command, arguments, env=environ, standalone_mode=False)
    if done.exception is not None:
        assert isinstance(done.exception, StratagemError), done.exception
        return (2 if isinstance(done.exception, ConfigurationError) else 1), str(done.exception)
    return done.return_value, done.stdout.strip()


def test_live_is_not_ready(server: RunningServer) -> None:
    ask = ["--task", "chief:0", "--address", server.address]
    assert health(*ask) == (0, "chief:0: SERVING")
    assert health(*ask, "--ready") == (1, "chief:0: NOT_SERVING")
    server.set_serving(True)
    assert health(*ask, "--ready") == (0, "chief:0: SERVING")
    code, words = health("--task", "ps:0", "--address", server.address, "--ready")
    assert (
        code == 2
        and f"something other than ps:0 at {server.address} answers at its address (NOT_FOUND): check" in words
    )


def test_it_finds_the_task_as_the_task_does(server: RunningServer, tmp_path: Path) -> None:
    port = server.address.rpartition(":")[2]
    assert health(STRATAGEM_TASK="chief:0", STRATAGEM_BIND=f"0.0.0.0:{port}")[0] == 0
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:0"]}
    assert health(TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))[0] == 0
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"cluster": cluster, "chief": {"checkpoint_every_s": 5.0}}))
    assert health("--task", "chief:0", "--cluster", str(file))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "which task?"),
        (["--task", "ps:0"], 2, "a free port that a probe cannot know"),
        (["--task", "evaluator:0", "--address", "127.0.0.1:1"], 2, "serves nothing that can be probed"),
        (["--task", "boss:0"], 2, "expected a task like 'worker:0'"),
        (["--task", "ps:0", "--address", "127.0.0.1:1"], 1, "ps:0 at 127.0.0.1:1 cannot be reached"),
        (["--task", "ps:0", "--address", "127.0.0.1:1", "--tls", "/nowhere"], 2, "no TLS for ps:0"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], code: int, words: str) -> None:
    got, message = health(*arguments, "--timeout-s", "5")
    assert got == code and words in message


def test_with_tls_and_a_token(tmp_path: Path) -> None:
    make_throw_away(tmp_path, ["chief:0", "ps:0"])
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    running = listen(make_security("chief:0", str(tmp_path), str(tmp_path / "token")))
    try:
        ask = ["--task", "chief:0", "--address", running.address]
        own = {"STRATAGEM_TLS": str(tmp_path), "STRATAGEM_TOKEN_FILE": str(tmp_path / "token")}
        assert health(*ask, **own) == (0, "chief:0: SERVING")
        assert health(*ask) == (1, f"chief:0 at {running.address} speaks TLS: give --tls DIR")
        code, words = health("--task", "ps:0", "--address", running.address, **own)
        assert code == 1 and "is chief:0 according to its certificate, but ps:0 was expected there" in words
    finally:
        running.stop(0)


@pytest.mark.parametrize(
    ("bind", "asked"),
    [("0.0.0.0:2222", "127.0.0.1:2222"), ("[::]:2222", "[::1]:2222"), ("host:2222", "host:2222")],
)
def test_where_it_asks(bind: str, asked: str) -> None:
    assert address_to_ask(RoleConfig(task="ps:0", bind=bind)) == asked


def test_a_chief_needs_no_number_of_workers_to_be_asked() -> None:
    environ = {"STRATAGEM_TASK": "chief:0", "STRATAGEM_BIND": "0.0.0.0:1", "STRATAGEM_NUM_PS": "2"}
    config = gather(None, environ)[0].config
    assert (config.task, config.bind) == ("chief:0", "0.0.0.0:1")


def test_an_empty_task_is_the_one_that_the_environment_names(server: RunningServer) -> None:
    """As of ``--task "$NAME"``, where that is not set."""
    assert health("--task=", "--address", server.address, STRATAGEM_TASK="chief:0") == (0, "chief:0: SERVING")


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['stratagem', 'health', '--task', 'ps:0', '--address', '127.0.0.1:1']\n"
        "from stratagem.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "False", "False"], done.stderr
