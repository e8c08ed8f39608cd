"""`stratagem render`: the files that run a script on a cluster of machines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stratagem.cli.options import Number, pairs_of, warn_of_late_flags
from stratagem.cluster.choice import STRATEGIES
from stratagem.cluster.spec import refuse_unknown
from stratagem.errors import ConfigurationError
from stratagem.launch.machines import TASK_MACHINES, parse_machine
from stratagem.launch.manifests import jobset, kubernetes
from stratagem.launch.manifests.pod import Object, roles_of, to_yaml
from stratagem.launch.manifests.workload import ACCESS_MODES, Workload
from stratagem.launch.plan import OF_ONE_TASK
from stratagem.launch.submit.request import check_labels

VARIABLES_OF_THE_OBJECTS = {
    **dict.fromkeys((*OF_ONE_TASK, "STRATAGEM_TASK", "STRATAGEM_CHIEF", "STRATAGEM_ADVERTISE", "STRATAGEM_RUN_ID"), ""),
    **{f"STRATAGEM_{name}": f"--{name.lower().replace('_', '-')}" for name in ("STRATEGY", "STALENESS", "WEB")},
    **{"STRATAGEM_NUM_WORKERS": "--workers", "STRATAGEM_NUM_PS": "--ps", "STRATAGEM_BIND": "--port"},
    **{"STRATAGEM_TLS": "--tls-secret", "STRATAGEM_TOKEN_FILE": "--token-secret"},
    "STRATAGEM_CHECKPOINT_EVERY_S": "--checkpoint-every-s",
}
"""What they give the tasks themselves, and the option that says each, if there is one; the chart refuses the same."""
RENDERERS: dict[str, Callable[[Workload], list[Object]]] = {
    "kubernetes": kubernetes.render,
    "jobset": jobset.render,
    "trainjob": jobset.render_trainjob,
}
_DEFAULTS = ", ".join(f"{role}={one.cpu_cores:g}:{one.memory_gib:g}" for role, one in TASK_MACHINES.items())


@click.command("render", context_settings={"allow_interspersed_args": False, "show_default": True})
@click.option("--target", type=click.Choice(list(RENDERERS)), default="kubernetes", help="Kind of objects to print.")
@click.option("--name", default="train", help="Name of the job.")
@click.option("--image", default="stratagem", help="Image that contains stratagem and SCRIPT.")
@click.option("--workers", "num_workers", default=1, help="Workers, each a pod that runs the script.")
@click.option("--ps", "num_ps", default=0, help="Parameter servers.")
@click.option("--evaluator", is_flag=True, help="Add an evaluator.")
@click.option("--strategy", type=click.Choice(STRATEGIES), default="auto", help="As in `stratagem run`.")
@click.option("--staleness", type=float, default=math.inf, help="Staleness bound: 0 synchronous, inf asynchronous.")
@click.option(
    "--checkpoint-every-s",
    type=Number(0),
    default=0.0,
    help="Seconds between checkpoints that the chief takes; 0: none.",
)
@click.option(
    "--machine",
    "machines",
    multiple=True,
    help=f"ROLE=CORES:GIB[:GPUS], or ROLE=NAME (worker=T4_1X). Default: {_DEFAULTS}; cores are reserved, GiB a limit.",
)
@click.option("--env", "environment", multiple=True, help="NAME=VALUE for every task.")
@click.option("--label", "labels", multiple=True, help="NAME=VALUE for every object.")
@click.option("--tls-secret", default="", help="Secret with ca.crt and every task's certificate and key.")
@click.option("--token-secret", default="", help="Secret whose key 'token' is the job's token.")
@click.option("--volume-gib", default=Workload.volume_gib, help="Size of the job's volume.")
@click.option(
    "--access-mode",
    type=click.Choice(ACCESS_MODES),
    default=ACCESS_MODES[0],
    help="Access mode of the volume. On one node (kind, minikube, k3s): ReadWriteOnce.",
)
@click.option("--storage-class", default="", help="Class of the volume; else the cluster's default.")
@click.option("--port", default=Workload.port, help="Port on which every task listens.")
@click.option(
    "--web", default=Workload.web, help="Port of the chief's live page, for kubectl port-forward; with TLS for all."
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def render_command(
    target: str, environment: tuple[str, ...], labels: tuple[str, ...], machines: tuple[str, ...], **options: Any
) -> None:
    """Print the YAML that trains SCRIPT (a path in the image) with ARGS; `… | kubectl apply -f -` starts it."""
    script, args = options["script"], options["args"]
    if script in RENDERERS:
        raise ConfigurationError(f"{script} is a kind of objects: write --target {script}, then the script")
    warn_of_late_flags(render_command, Path(script), args)
    named = pairs_of("--machine NAME=VALUE", machines)
    refuse_unknown("role", named, TASK_MACHINES, " in --machine")
    options |= {role: parse_machine(name) for role, name in named.items()}
    told = pairs_of("--env NAME=VALUE", environment)
    for name in told:
        if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", name):
            raise ConfigurationError(
                "expected letters, digits, '-', '_' and '.' as the name of a variable, and no digit first, got "
                f"{name!r}: Kubernetes takes no other"
            )
        if name in VARIABLES_OF_THE_OBJECTS:
            option = VARIABLES_OF_THE_OBJECTS[name]
            way_out = f"say it by {option}" if option else "leave it out"
            raise ConfigurationError(f"--env {name}: the tasks are told theirs by other means; {way_out}")
    marks = check_labels(pairs_of("--label NAME=VALUE", labels))
    workload = Workload(**options, environment=told, labels=marks)
    refuse_unknown("role", named, {*roles_of(workload)} - {"evaluator"}, " in this job, for --machine")
    click.echo(to_yaml(RENDERERS[target](workload)), nl=False)
