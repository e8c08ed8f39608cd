"""Which replica of a docker-compose service this container is.

Compose numbers the containers of a service, but puts the number only into the container's name. The name server of the
container's network has that name for the container's address.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

from stratagem.cluster.sources import ENV_PREFIX
from stratagem.errors import ClusterSpecError

COMPOSE = "compose"
"""In the place of a task's index, as in "worker:compose": the container's number in its service, less one."""
_TASK, _ADVERTISE = ENV_PREFIX + "TASK", ENV_PREFIX + "ADVERTISE"
_TIMEOUT_S = 10.0


def own_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """``environ``, with STRATAGEM_TASK=worker:compose turned into the task that this container is; a ClusterSpecError
    where docker-compose numbers none. STRATAGEM_ADVERTISE, where it is not set, becomes the container's name, by which
    the others reach it."""
    kind, _, index = environ.get(_TASK, "").partition(":")
    if index != COMPOSE:
        return environ
    name = container_name()
    return {_ADVERTISE: f"{name}:0", **environ, _TASK: f"{kind}:{index_of(name)}"}


def index_of(container: str) -> int:
    """``"project-worker-2"``: 1, because compose counts from 1. ClusterSpecError: the name does not end in a number."""
    found = re.search(r"[-_]([1-9]\d{0,5})$", container)
    if found is None:
        raise ClusterSpecError(
            f"expected a container name of docker-compose, like project-worker-2, got {container!r}; name the task "
            f"itself in {_TASK}"
        )
    return int(found[1]) - 1


def container_name() -> str:
    """The name of this container, as the name server of its network says it; a ClusterSpecError when it says none."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        # Not gethostbyaddr: that would answer from /etc/hosts, where the host name stands, not the container's name.
        command = ["getent", "-s", "dns", "hosts", address]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False).stdout.split()
    except subprocess.TimeoutExpired:
        answer = []  # outside of compose's networks it is the host's, which may not be reached
    except OSError as error:
        raise ClusterSpecError(f"{_TASK} needs this container's name, which cannot be found: {error}") from None
    if len(answer) < 2:
        raise ClusterSpecError(
            f"{_TASK} needs this container's name, but the name server has none for {address}: this form works in "
            f"containers of docker-compose; elsewhere give the index, for example {_TASK}=worker:0"
        )
    return answer[1].rpartition(".")[0] or answer[1]  # without the network's name
