"""A job in containers: which tasks, of which image, on which machines. Pure, no I/O."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from stratagem.cluster.choice import ONE_PROCESS, StrategyName, choose_strategy
from stratagem.cluster.job_rules import check_checkpoint_every, check_staleness, no_effect
from stratagem.cluster.spec import refuse_unknown
from stratagem.errors import ConfigurationError
from stratagem.launch.machines import TASK_MACHINES, MachineConfig

ACCESS_MODES = ("ReadWriteMany", "ReadWriteOnce")
"""Of a volume on Kubernetes: for pods on several nodes, or for pods that are all on one."""
MOST_TASKS = 4096
MAX_DNS_NAME, DNS_NAME = 253, re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
"""What Kubernetes takes as the name of an object."""
_HOST = r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*"
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST}(:[0-9]+)?/)?{_PATH}(/{_PATH})*(:[a-zA-Z0-9_][a-zA-Z0-9_.-]{{0,127}})?(@[a-zA-Z0-9+._-]+:[0-9a-f]{{32,}})?"
)
"""What Docker and Kubernetes take as a reference to an image."""
_MAX_VOLUME_GIB = (1 << 33) - 1
"""Kubernetes counts the bytes in 63 bits."""
_FIRST_PORT = 1024
"""Only root listens below it, and no task is root."""
_NAME_CHARACTERS = 40
_NAME = re.compile(rf"(?=.{{1,{_NAME_CHARACTERS}}}$)[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)


def check_image(name: str, image: str) -> None:
    """Refuses (ConfigurationError) what cannot be pulled; ``name``: of the argument that gives it."""
    if not _IMAGE.fullmatch(image):
        raise ConfigurationError(
            f"expected {name} to be an image like 'name:tag' or 'registry.example:5000/team/name:tag', the name in "
            f"lower case, got {image!r}"
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every renderer takes: docker-compose, Kubernetes, JobSet and TrainJob show the same job. ConfigurationError:
    the name cannot be part of a host name, or a count is too low. ClusterSpecError: the strategy cannot run on these
    tasks."""

    name: str
    """Of the job: lower-case letters, digits and "-"; at most 40 characters, because pods add theirs."""
    image: str
    """Has stratagem installed and the script in its working directory."""
    script: str
    """Path of the training script inside the image."""
    args: tuple[str, ...] = ()
    num_workers: int = 1
    num_ps: int = 0
    evaluator: bool = False
    strategy: str = "auto"
    staleness: float = math.inf
    chief: MachineConfig = TASK_MACHINES["chief"]
    worker: MachineConfig = TASK_MACHINES["worker"]
    ps: MachineConfig = TASK_MACHINES["ps"]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For every task."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The user's own, beside those of the job."""
    checkpoint_every_s: float = 0.0
    tls_secret: str = ""
    """Kubernetes Secret with ca.crt, and <task>.crt and <task>.key of every task; empty: no TLS."""
    token_secret: str = ""
    """Kubernetes Secret whose key "token" is the token of the job; empty: none."""
    port: int = 2222
    """Of every task; each has an address of its own."""
    web: int = 0
    """Port of the chief's page; 0: none. On Kubernetes on the loopback of its pod, and with ``tls_secret`` at every
    address."""
    volume_gib: int = 10
    access_mode: str = ACCESS_MODES[0]
    """Of the volume: one of ``ACCESS_MODES``."""
    storage_class: str = ""
    """Of the volume; empty: the cluster's default."""

    def __post_init__(self) -> None:
        if not (self.image and self.script):
            raise ConfigurationError(f"expected an image and a script in it, got {self.image!r} and {self.script!r}")
        for text in (self.script, *self.args, *self.environment.values()):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigurationError(
                    f"expected a script, arguments and variables in UTF-8, got {text!r}: containers are told no other"
                )
        check_image("image", self.image)
        check_staleness(self.staleness, self.num_ps)
        check_checkpoint_every(self.checkpoint_every_s, self.num_ps)
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"expected a name of at most {_NAME_CHARACTERS} lower-case letters, digits and '-' that starts with a "
                f"letter, got {self.name!r}: it becomes part of host names"
            )
        for name in filter(None, (self.tls_secret, self.token_secret, self.storage_class)):
            if len(name) > MAX_DNS_NAME or not DNS_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"expected the name of a Secret or storage class as Kubernetes takes it ({MAX_DNS_NAME} lower-case "
                    f"letters, digits, '-' and '.' at most), got {name!r}"
                )
        if not (1 <= self.num_workers <= MOST_TASKS and 0 <= self.num_ps <= MOST_TASKS):
            raise ConfigurationError(
                f"expected at least one worker, no negative count and at most {MOST_TASKS} of each, got "
                f"{self.num_workers} workers and {self.num_ps} ps"
            )
        refuse_unknown("access mode", [self.access_mode], ACCESS_MODES)
        if not 1 <= self.volume_gib <= _MAX_VOLUME_GIB:
            raise ConfigurationError(f"expected a volume of 1 to {_MAX_VOLUME_GIB:,} GiB, got {self.volume_gib}")
        for port in (self.port, self.web or self.port):
            if not _FIRST_PORT <= port < 65536:
                raise ConfigurationError(f"expected ports from {_FIRST_PORT} to 65535, as no task is root, got {port}")
        if self.web == self.port:
            raise ConfigurationError(f"expected a port for the page other than {self.port}, got {self.web}")
        if self.chosen_strategy in ONE_PROCESS:
            self._check_one_process()

    def _check_one_process(self) -> None:
        for is_asked, why in (
            (self.web, "the chief serves the page"),
            (self.evaluator, "an evaluator needs a cluster"),
        ):
            if is_asked:
                raise ConfigurationError(f"{why}, and this job is one process: use two workers, or a ps")
        idle = {
            "--tls-secret": self.tls_secret,
            "--token-secret": self.token_secret,
            "--port": self.port != Workload.port,
        }
        for option, is_given in idle.items():
            if is_given:
                raise ConfigurationError(no_effect(option, self.chosen_strategy))

    @property
    def chosen_strategy(self) -> StrategyName:
        """The strategy, with "auto" resolved."""
        return choose_strategy(self.strategy, self.num_workers, self.num_ps, self.worker.accelerator_count)

    @property
    def strategy_name(self) -> str:
        """What the tasks are told: of one process "auto" stays, because it sees for itself what devices it has."""
        return self.strategy if self.chosen_strategy in ONE_PROCESS else self.chosen_strategy
