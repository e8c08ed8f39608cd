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
        ("--volume-gib 0 t.py", "a volume of at least 1 GiB, got 0"),
        ("--strategy ring --ps 1 t.py", "without parameter servers"),
    ],
)
def test_refusals(options: str, words: str) -> None:
    result = render(*options.split())
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)
