"""`stratagem render`: options become a job, and the job YAML."""

from __future__ import annotations

import shlex

import pytest
import yaml
from click.testing import CliRunner, Result

from stratagem.cli.render import render_command
from stratagem.errors import ConfigurationError
from stratagem.launch.machines import COMMON_MACHINE_CONFIGS, MachineConfig
from stratagem.launch.manifests import jobset, kubernetes
from stratagem.launch.manifests.workload import Workload


def render(*arguments: str) -> Result:
    return CliRunner().invoke(render_command, arguments, standalone_mode=False)


def test_options_become_a_workload() -> None:
    workload = Workload(
        "digits",
        "image:2",
        "train.py",
        ("--epochs", "3"),
        num_workers=2,
        num_ps=1,
        evaluator=True,
        staleness=4.0,
        chief=MachineConfig(0.5, 1),
        worker=MachineConfig(4, 16, accelerator_count=2),
        ps=COMMON_MACHINE_CONFIGS["CPU"],
        environment={"A": "b=c"},
        labels={"team": "x"},
        checkpoint_every_s=30,
        tls_secret="certs",
        token_secret="token",
        port=4000,
        volume_gib=2,
        access_mode="ReadWriteOnce",
        storage_class="fast",
    )
    options = shlex.split(
        "--name digits --image image:2 --workers 2 --ps 1 --evaluator --staleness 4 --checkpoint-every-s 30 "
        "--machine chief=0.5:1 --machine worker=4:16:2 --machine ps=CPU --env A=b=c --label team=x --tls-secret certs "
        "--token-secret token --port 4000 --volume-gib 2 --access-mode ReadWriteOnce --storage-class fast "
        "train.py --epochs 3"
    )
    result = render(*options)
    assert list(yaml.safe_load_all(result.output)) == kubernetes.render(workload)
    assert "&id" not in result.output  # no aliases: people read it, and edit it
    assert list(yaml.safe_load_all(render("--target", "jobset", *options).output)) == jobset.render(workload)


@pytest.mark.parametrize(
    "image", ["a", "stratagem:1.2-x", "localhost:5000/a__b/c-d:Tag", f"r.example/a@sha256:{'0a' * 32}"]
)
def test_images(image: str) -> None:
    assert f"image: {image}\n" in render("--image", image, "t.py").output


def test_options_behind_the_script_are_told() -> None:
    result = render("t.py", "--workers=4", "--lr", "1")
    assert "--workers=4 comes after t.py, so it goes to the script" in result.stderr
    assert "--lr" not in render("t.py", "--lr", "1").stderr


def test_text_that_other_readers_of_yaml_take_for_numbers_is_quoted() -> None:
    """PyYAML reads these as text with and without quotes, kubectl and compose with quotes alone."""
    result = render("--label", "commit=12e4567", "--env", "DEBUG=y", "t.py", "--lr", "1e-4", "0o17", "512Mi")
    lines = {line.strip(" -") for line in result.output.splitlines()}
    assert {"commit: '12e4567'", "DEBUG: 'y'", "'1e-4'", "'0o17'", "512Mi", "backoffLimit: 20"} <= lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--machine worker=4 t.py", "a machine like 4:16"),
        ("--machine worker=inf:16 t.py", "a machine like 4:16"),
        ("--machine worker=4:0.0001 t.py", "a machine like 4:16"),
        ("--machine worker=T4_1x t.py", "did you mean 'T4_1X'"),
        ("--machine work=CPU t.py", "unknown role 'work' in --machine; did you mean 'worker'"),
        ("--env A t.py", "expected --env NAME=VALUE, got 'A'"),
        ("--env A=1 --env A=2 t.py", "expected --env NAME=VALUE once for A, got A=1 and A=2"),
        ("--machine ps=CPU --machine ps=4:8 t.py", "once for ps, got ps=CPU and ps=4:8"),
        ("--env 1A=2 t.py", "as the name of a variable, and no digit first, got '1A'"),
        ("--env A/B=2 t.py", "as the name of a variable, and no digit first, got 'A/B'"),
        ("--label team=a/b t.py", "the label team='a/b' has no valid value"),
        ("--label app.kubernetes.io/name=mine t.py", "app.kubernetes.io/ is reserved"),
        ("--name A t.py", "got 'A'"),
        ("--image= t.py", "expected an image and a script in it, got '' and 't.py'"),
        ("t.py \udcff", "variables in UTF-8, got '\\udcff'"),
        ("--env A=\udcff t.py", "variables in UTF-8, got '\\udcff'"),
        ("--workers 2 --staleness 2 t.py", "a staleness of 2 needs parameter servers: add ps"),
        ("--workers 2 --checkpoint-every-s 30 t.py", "--checkpoint-every-s is for parameter servers"),
        ("--workers 100000 t.py", "at most 4096 of each, got 100000 workers"),
        ("--machine worker=inf:1 t.py", "a machine like 4:16"),
        ("--workers 4096 --ps 4096 t.py", "the addresses of all tasks are 186,258 characters"),
        (
            "--tls-secret A t.py",
            "of a Secret or storage class as Kubernetes takes it (253 lower-case",
        ),
        ("--token-secret a/b t.py", "the name of a Secret or storage class as Kubernetes takes it"),
        ("--storage-class a..b t.py", "the name of a Secret or storage class as Kubernetes takes it"),
        ("--volume-gib 0 t.py", "a volume of 1 to 8,589,934,591 GiB, got 0"),
        ("--volume-gib 8589934592 t.py", "a volume of 1 to 8,589,934,591 GiB, got 8589934592"),
        ("--image=https://a/b t.py", "an image like 'name:tag' or"),
        ("--image=team/Name t.py", "the name in lower case, got 'team/Name'"),
        ("--image=a@sha256:12 t.py", "an image like 'name:tag' or"),
        ("--env STRATAGEM_PEER_TIMEOUT_S=soon t.py", "peer_timeout_s from environment STRATAGEM_PEER_TIMEOUT_S: input"),
        ("--env STRATAGEM_PEER_TIMEOUT=9 t.py", "STRATAGEM_PEER_TIMEOUT='9' in the environment; did you mean 'STRAT"),
        ("--ps 1 --env STRATAGEM_SESSION_TIMEOUT_S=0.1 t.py", "heartbeat_interval_s 0.5 has to be less than session"),
        ("--ps 1 --env STRATAGEM_TRANSPORT=nccl t.py", "transport from environment STRATAGEM_TRANSPORT"),
        ("--env STRATAGEM_STALENESS=2 --ps 1 t.py", "told theirs by other means; say it by --staleness"),
        ("--env STRATAGEM_BIND=0.0.0.0:1 --ps 1 t.py", "say it by --port"),
        ("--env STRATAGEM_TASK=ps:0 --ps 1 t.py", "told theirs by other means; leave it out"),
        ("--env TF_CONFIG={} t.py", "told theirs by other means; leave it out"),
        ("--tls-secret a t.py", "--tls-secret is for several workers and has no effect in one process"),
        ("--token-secret a t.py", "--token-secret is for several workers and has no effect in one process"),
        ("--port 4000 t.py", "--port is for several workers and has no effect in one process"),
        ("--port 80 --ps 1 t.py", "ports from 1024 to 65535, as no task is root, got 80"),
        ("--web 65536 --ps 1 t.py", "ports from 1024 to 65535, as no task is root, got 65536"),
        ("--machine ps=1:1 --workers 2 t.py", "unknown role 'ps' in this job, for --machine; known: chief, worker"),
        ("--machine chief=1:1 t.py", "unknown role 'chief' in this job, for --machine; known: worker"),
        ("--strategy ring --ps 1 t.py", "without parameter servers"),
        ("jobset t.py", "write --target jobset, then the script"),
    ],
)
def test_refusals(options: str, words: str) -> None:
    result = render(*options.split())
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)
