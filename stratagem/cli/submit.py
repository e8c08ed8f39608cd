"""`stratagem submit`: what `sg.run()` does, from a command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from stratagem.cli.options import pairs_of, warn_of_late_flags
from stratagem.cluster.choice import STRATEGIES
from stratagem.launch.machines import COMMON_MACHINE_CONFIGS
from stratagem.launch.manifests.workload import ACCESS_MODES
from stratagem.launch.submit.api import submit_and_follow
from stratagem.launch.submit.request import TARGETS, JobRequest

_MACHINES = f"auto, CORES:GIB[:GPUS], or one of {', '.join(COMMON_MACHINE_CONFIGS)}."


def _refuse_module(_: click.Context, __: click.Parameter, module: str | None) -> None:
    if module is not None:
        raise click.UsageError(
            f"-m {module}: a job has a script, whose folder goes with it. Put a file beside the package, with\n"
            f'  import runpy; runpy.run_module("{module}", run_name="__main__", alter_sys=True)\n'
            "and submit that"
        )


@click.command("submit", context_settings={"allow_interspersed_args": False, "show_default": True})
@click.option("--target", type=click.Choice(TARGETS), default="local", help="Where the job runs.")
@click.option("--workers", "worker_count", default=0, help="Workers; 0: the chief trains alone.")
@click.option("--ps", "ps_count", default=0, help="Parameter servers.")
@click.option("--evaluator", is_flag=True, help="Start an evaluator too.")
@click.option(
    "--strategy",
    "distribution_strategy",
    type=click.Choice([*STRATEGIES, "none"]),
    default="auto",
    help="none: the script makes its own.",
)
@click.option("--staleness", type=float, default=math.inf, help="Staleness bound: 0 synchronous, inf asynchronous.")
@click.option("--chief-config", default="auto", help=f"Machine of the chief: {_MACHINES}")
@click.option("--worker-config", default="auto", help=f"Machine of each worker: {_MACHINES}")
@click.option("--ps-config", default="auto", help=f"Machine of each parameter server: {_MACHINES}")
@click.option("--requirements", "requirements_txt", type=click.Path(path_type=Path), help="Packages for the image.")
@click.option("--base-image", "docker_base_image", help="Image with stratagem; `stratagem` if not given.")
@click.option("--registry", "docker_image_bucket_name", help="Where the image is pushed to: host[:port]/path.")
@click.option("--build-network", "docker_build_network", help="Network of the build's steps, for example host.")
@click.option("--namespace", "kubernetes_namespace", help="Namespace; that of the kubeconfig's context if not given.")
@click.option("--storage-class", "kubernetes_storage_class", help="Class of the volume; else the cluster's default.")
@click.option(
    "--access-mode",
    "kubernetes_access_mode",
    type=click.Choice(ACCESS_MODES),
    help="Access mode of the volume; ReadWriteOnce if all pods are on one node (kind, minikube, k3s).",
)
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of the job; may be repeated.")
@click.option("--stream-logs", is_flag=True, help="Show the log until the job ends, then exit with its exit code.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("-m", "--module", hidden=True, expose_value=False, callback=_refuse_module)
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit_command(
    script: str, args: tuple[str, ...], labels: tuple[str, ...], stream_logs: bool, dry_run: bool, **options: Any
) -> int:
    """Submit SCRIPT (or a notebook) with ARGS as a job; prints the job's id on stdout."""
    warn_of_late_flags(submit_command, Path(script), args)
    if options["distribution_strategy"] == "none":
        options["distribution_strategy"] = None
    job_labels = pairs_of("--label KEY=VALUE", labels)
    request = JobRequest(entry_point_args=args, job_labels=job_labels, **options)
    job, code = submit_and_follow(request, script or ".", stream_logs=stream_logs, dry_run=dry_run)
    if not dry_run and not stream_logs:
        click.echo(job.id)
    return code
