"""`sg.run()`: runs this script on more machines."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratagem.arguments import checked
from stratagem.launch.machines import MachineConfig
from stratagem.launch.plan import current_folder
from stratagem.launch.submit import submission
from stratagem.launch.submit.entry_point import find_entry_point, running_shell
from stratagem.launch.submit.job import Job, own_job
from stratagem.launch.submit.plan import make_plan
from stratagem.launch.submit.record import JobStore, remote
from stratagem.launch.submit.request import JobRequest


@checked
def run(
    entry_point: str | Path | None = None,
    requirements_txt: str | Path | Sequence[str] | None = None,
    distribution_strategy: str | None = "auto",
    docker_base_image: str | None = None,
    chief_config: str | MachineConfig = "auto",
    worker_config: str | MachineConfig = "auto",
    worker_count: int = 0,
    entry_point_args: list[str] | tuple[str, ...] | None = None,
    stream_logs: bool = False,
    docker_image_bucket_name: str | None = None,
    job_labels: Mapping[str, str] | None = None,
    *,
    target: str = "local",
    ps_count: int = 0,
    ps_config: str | MachineConfig = "auto",
    evaluator: bool = False,
    staleness: float = math.inf,
    docker_build_network: str | None = None,
    kubernetes_namespace: str | None = None,
    kubernetes_storage_class: str | None = None,
    kubernetes_access_mode: str | None = None,
    dry_run: bool = False,
) -> Job:
    """Submits a training script as a job: validates, builds an image, pushes it, starts the tasks.

    The call and its argument names follow ``run()`` of TensorFlow Cloud, with three differences. The chief
    only coordinates, so ``worker_count`` is the number of workers that train. Nothing is wrapped around the script,
    which gets its strategy from ``strategy_from_environment()`` (``sg.Model`` and ``get_strategy()`` do this for a
    script that makes none; training without a strategy in a job of several replicas is an error). The default machine
    has no accelerator.

    A script may call this on itself (``entry_point=None``). In the job the call returns at once and the script
    continues. In the submitting process, **the rest of the script does not run**: after submitting, the call exits with
    ``sys.exit``, with 0, or with the job's exit code under ``stream_logs``. In a notebook it returns.

    Args:
        entry_point: script (.py) or notebook (.ipynb) below the working directory. None: the running notebook (its
            file in VS Code and JupyterLab, elsewhere the cells executed so far), or the running script.
        requirements_txt: file whose packages are installed in the image, or a list of them; a local job checks that
            they are installed.
        distribution_strategy: "auto": ParameterServerStrategy with ps, MultiWorkerMirroredStrategy with workers, else
            MirroredStrategy if the chief has several accelerators, else OneDeviceStrategy (on the CPU if no
            accelerator is requested). Or "one", "mirrored", "central", "ring", "ps". None: the script makes its own.
        docker_base_image: image with Python and this version of stratagem; None: ``stratagem``, built by
            deploy/Dockerfile.
        chief_config: machine of the chief: a name of ``COMMON_MACHINE_CONFIGS``, "CORES:GIB[:GPUS]" or a
            ``MachineConfig``. It trains if there are no workers ("auto": "CPU"); otherwise it coordinates ("auto": 0.1
            core, 0.5 GiB).
        worker_config: machine of each worker; "auto": "CPU".
        worker_count: number of workers; 0: the chief trains alone.
        entry_point_args: command-line arguments of the script.
        stream_logs: show the job's log until it ends.
        docker_image_bucket_name: registry to push the image to, for example "registry.example:5000/team".
        job_labels: labels that follow the rules of Kubernetes, at most 64.
        target: "local": processes of this machine, in the background (machine configurations choose the strategy
            only); "compose": containers of the Docker engine; "kubernetes": the cluster of the kubeconfig.
        ps_count: number of parameter servers.
        ps_config: machine of each parameter server; "auto": "CPU".
        evaluator: start an evaluator too.
        staleness: bound for parameter servers; 0: synchronous, inf: asynchronous.
        docker_build_network: network for the image's build steps, for example "host".
        kubernetes_namespace: None: that of the kubeconfig's context.
        kubernetes_storage_class: storage class of the job's volume; None: the cluster's default.
        kubernetes_access_mode: access mode of the volume: "ReadWriteMany" (None), or "ReadWriteOnce" if all pods are
            on one node (kind, minikube, k3s, whose storage supports nothing else).
        dry_run: print what would be done, and do nothing.

    Returns:
        The job; inside a job, that job.

    Raises:
        ConfigurationError: the request cannot work.
        SubmitError: Docker, the registry or the cluster refused.
    """
    given = locals()  # the arguments, which have the names of the fields of a request
    if remote():
        return own_job()
    request = JobRequest(**{field.name: given[field.name] for field in dataclasses.fields(JobRequest)})
    job, code = submit_and_follow(request, entry_point, stream_logs=stream_logs, dry_run=dry_run)
    if entry_point is None and running_shell() is None:
        sys.exit(code)
    return job


def submit_and_follow(
    request: JobRequest, entry_point: str | Path | None, *, stream_logs: bool = False, dry_run: bool = False
) -> tuple[Job, int]:
    """What `run()` and `stratagem submit` have in common. ``entry_point``: as the user wrote it; None: whoever calls.
    Gives the job, and an exit code: the job's under ``stream_logs``, else 0."""
    root = Path(current_folder())
    plan = make_plan(request, find_entry_point(entry_point), root)
    about_context = plan.image.context.warning() if plan.image is not None else ""
    for note in filter(None, (plan.entry_point.note, request.warning(), about_context)):
        print(f"stratagem: {note}", file=sys.stderr)
    if dry_run:
        print(submission.show(plan), end="")
        return Job("", request.target), 0
    store = JobStore()
    record = submission.submit(plan, str(entry_point or plan.entry_point.path.name), store)
    job = Job(record.id, record.target, record.image, str(store.folder(record.id)))
    print(f"stratagem: job {job.id} runs on {job.target}: stratagem jobs logs --follow {job.id}", file=sys.stderr)
    if not stream_logs:
        return job, 0
    try:
        state = job.wait(stream_logs=True)
    except KeyboardInterrupt:
        print(f"stratagem: the job goes on; what ends it: stratagem jobs cancel {job.id}", file=sys.stderr)
        raise
    code = state.exit_code if state.exit_code is not None else 1
    print(f"stratagem: job {job.id} {state.phase}, exit code {code}", file=sys.stderr)
    return job, code
