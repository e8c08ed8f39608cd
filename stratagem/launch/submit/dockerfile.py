"""The Dockerfile of a job's image. Pure, no I/O."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from stratagem import __version__
from stratagem.launch.manifests.pod import JOB_FOLDER, USER

DEFAULT_BASE_IMAGE = "stratagem:latest"
"""What deploy/Dockerfile makes (`docker compose build`)."""
OWNER = f"{USER}:{USER}"
PROJECT = "/project"
"""Of the project in the image; its working directory."""


def render_dockerfile(
    job_id: str, base_image: str, script: str, has_requirements: bool, labels: Mapping[str, str]
) -> str:
    """The text of the Dockerfile.

    The archive that is sent has it at the top, beside ``requirements.txt`` and the project in ``project/``.

    Args:
        job_id: becomes a label.
        base_image: has Python and stratagem, of the version of whoever submits.
        script: path in the project; what the image runs when nothing else is said.
        has_requirements: install requirements.txt.
    """
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
