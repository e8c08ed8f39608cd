"""Everything about a job before anything happens: `dry_run` shows exactly what is done."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from stratagem import __version__
from stratagem.launch.manifests.pod import JOB_FOLDER, USER
from stratagem.launch.manifests.workload import ACCESS_MODES, Workload
from stratagem.launch.submit.build_context import BuildContext, read_context
from stratagem.launch.submit.entry_point import EntryPoint, path_inside
from stratagem.launch.submit.record import VARIABLES
from stratagem.launch.submit.request import JobRequest

_MAX_STEM = 24
DEFAULT_BASE_IMAGE = "stratagem:latest"
"""What deploy/Dockerfile makes (`docker compose build`)."""
CHECKPOINT_EVERY_S = 30.0
"""Of a job on parameter servers in containers, which cannot be told: that of the chart."""
OWNER = f"{USER}:{USER}"
PROJECT = "/project"
"""Of the project in the image; its working directory."""


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    name: str
    """Under which it is built, and pushed if ``pushed``."""
    context: BuildContext
    made: Mapping[str, str]
    """Texts in the archive beside the project: Dockerfile, requirements, a script made from a notebook."""
    pushed: bool
    network: str | None
    """Network of the build's RUN steps; None: Docker's default."""


@dataclasses.dataclass(frozen=True)
class JobPlan:
    id: str
    request: JobRequest
    entry_point: EntryPoint
    root: Path
    """The working directory: the project."""
    image: ImagePlan | None
    """None for a local job."""

    def workload(self, image: str = "") -> Workload:
        """The job in containers of ``image``; empty: by the name under which it is built."""
        assert self.image is not None
        request, image = self.request, image or self.image.name
        # A job without workers is its chief, which trains: the process of worker 0, on the chief's machine.
        return Workload(
            name=self.id,
            image=image,
            script=path_inside(self.entry_point.path, self.root, "entry_point"),
            args=request.args,
            num_workers=request.num_workers,
            num_ps=request.ps_count,
            evaluator=request.evaluator,
            strategy=request.strategy_of_tasks,
            staleness=request.staleness,
            chief=request.chief,
            worker=request.trainer,
            ps=request.ps,
            environment=self.environment(image, JOB_FOLDER),
            labels=request.labels,
            access_mode=request.kubernetes_access_mode or ACCESS_MODES[0],
            storage_class=request.kubernetes_storage_class or "",
            checkpoint_every_s=CHECKPOINT_EVERY_S if request.ps_count else 0.0,
        )

    def environment(self, image: str, folder: str) -> dict[str, str]:
        """Variables of every task, of an ``image`` if not empty; all see the ``folder``, and it stays after the job."""
        variables = dict(zip(VARIABLES, (self.id, self.request.target, image, folder), strict=True))
        if self.request.devices:
            variables["STRATAGEM_DEVICES"] = self.request.devices
        return variables


def make_plan(request: JobRequest, entry_point: EntryPoint, root: Path) -> JobPlan:
    """Plans a job; ``root``: the project, whose files go into the image. ConfigurationError: one that is needed would
    not be there."""
    job_id = new_job_id(entry_point.stem)
    image = None if request.target == "local" else _plan_image(request, entry_point, root, job_id)
    plan = JobPlan(job_id, request, entry_point, root, image)
    if image is not None:
        plan.workload()  # what is wrong with it is said before anything is built
    return plan


def _plan_image(request: JobRequest, entry_point: EntryPoint, root: Path, job_id: str) -> ImagePlan:
    script = path_inside(entry_point.path, root, "entry_point")
    context = read_context(root)
    made: dict[str, str] = {}
    if entry_point.source is None:
        context.check_holds(script)
    else:
        made[f"project/{script}"] = entry_point.source
    if isinstance(request.requirements_txt, str | Path):
        path_inside(Path(request.requirements_txt), root, "requirements_txt")
    if (requirements := request.requirements) is not None:
        made["requirements.txt"] = requirements
    base_image = request.docker_base_image or DEFAULT_BASE_IMAGE
    dockerfile = render_dockerfile(job_id, base_image, script, "requirements.txt" in made, request.labels)
    registry = request.docker_image_bucket_name
    name = f"{registry}/{job_id}" if registry else f"stratagem-job/{job_id}"
    made = {"Dockerfile": dockerfile, **made}
    return ImagePlan(f"{name}:latest", context, made, bool(registry), request.docker_build_network)


def render_dockerfile(
    job_id: str, base_image: str, script: str, has_requirements: bool, labels: Mapping[str, str]
) -> str:
    """The text of the Dockerfile, which the archive that is sent has at the top, beside ``requirements.txt`` and the
    project in ``project/``. ``base_image`` has Python and stratagem, of the version of whoever submits; ``script``, a
    path in the project, is what the image runs when nothing else is said."""
    missing = (
        f"the base image {base_image} has no stratagem {__version__}: build one with deploy/Dockerfile and name it "
        "docker_base_image"
    )
    check = f"import stratagem, sys; sys.exit(stratagem.__version__ != {__version__!r})"
    lines = [
        f"# Made by sg.run() for the job {job_id}.",
        f"FROM {base_image}",
        "USER root",
        f"RUN python -c {shlex.quote(check)} || {{ echo {shlex.quote(missing)} >&2; exit 1; }}",
    ]
    if has_requirements:
        lines += [
            "COPY requirements.txt /tmp/requirements.txt",
            "RUN python -m pip install --no-cache-dir --requirement /tmp/requirements.txt",
        ]
    lines += [
        # A volume that is mounted there first takes its owner from this folder.
        f"RUN install --directory --owner={USER} --group={USER} {PROJECT} {JOB_FOLDER}",
        f"COPY --chown={OWNER} project/ {PROJECT}/",
        f"WORKDIR {PROJECT}",
        f"USER {OWNER}",
        "ENV HOME=/tmp PYTHONUNBUFFERED=1",
    ]
    stated = {"stratagem.job": job_id, **labels}
    lines += [f"LABEL {json.dumps(key)}={json.dumps(value)}" for key, value in stated.items()]
    lines += ["ENTRYPOINT []", f"CMD {json.dumps(['stratagem', 'run', script])}"]
    return "\n".join(lines) + "\n"


def new_job_id(stem: str) -> str:
    """A name for a job: the script's, and eight digits that no other job has. At most 33 characters, a DNS label."""
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_MAX_STEM].strip("-") or "job"
    words = words if words[0].isalpha() else f"job-{words}"[:_MAX_STEM].strip("-")
    return f"{words}-{secrets.token_hex(4)}"
