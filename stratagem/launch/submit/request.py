"""A checked request to `run()`: the one place that knows which requests make sense."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratagem.arguments import nearest, whole_number
from stratagem.cluster.choice import ONE_PROCESS, STRATEGIES, StrategyName, choose_strategy
from stratagem.cluster.job_rules import check_staleness
from stratagem.cluster.spec import refuse_unknown
from stratagem.errors import ConfigurationError
from stratagem.launch.machines import TASK_MACHINES, MachineConfig, parse_machine
from stratagem.launch.manifests.workload import ACCESS_MODES, DNS_NAME, MAX_DNS_NAME, check_image

TARGETS = ("local", "compose", "kubernetes")
MAX_LABELS = 64
_MAX_NAME = 63
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_RESERVED = ("kubernetes.io", "k8s.io", "stratagem.dev", "app.kubernetes.io")

_REGISTRY = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """One job, as the user wrote it; the names are those of :func:`stratagem.run`. The ConfigurationError says what was
    expected, what came, and what to write instead."""

    target: str = "local"
    distribution_strategy: str | None = "auto"
    chief_config: str | MachineConfig = "auto"
    worker_config: str | MachineConfig = "auto"
    worker_count: int = 0
    ps_config: str | MachineConfig = "auto"
    ps_count: int = 0
    evaluator: bool = False
    staleness: float = math.inf
    entry_point_args: list[str] | tuple[str, ...] | None = None
    requirements_txt: str | Path | Sequence[str] | None = None
    docker_base_image: str | None = None
    docker_image_bucket_name: str | None = None
    docker_build_network: str | None = None
    kubernetes_namespace: str | None = None
    kubernetes_storage_class: str | None = None
    kubernetes_access_mode: str | None = None
    job_labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        refuse_unknown("target", [self.target], TARGETS)
        args = () if self.entry_point_args is None else self.entry_point_args
        if not isinstance(args, list | tuple) or any(not isinstance(arg, str) for arg in args):
            raise ConfigurationError(
                f"expected entry_point_args to be a list of strings like ['--epochs', '3'], got {args!r}"
            )
        whole_number("worker_count", self.worker_count, 0)
        whole_number("ps_count", self.ps_count, 0)
        check_staleness(self.staleness, self.ps_count)
        self._check_strategy()
        for name in ("chief_config", "worker_config", "ps_config"):
            machine_of(getattr(self, name), name)
        if isinstance(self.requirements_txt, str | Path) and not Path(self.requirements_txt).is_file():
            raise ConfigurationError(
                f"expected requirements_txt to be a file, but there is no {self.requirements_txt}; "
                f"the working directory is {Path.cwd()}"
            )
        packages = () if self.requirements_txt is None else self.requirements_txt
        if not isinstance(packages, str | Path) and not (
            isinstance(packages, list | tuple) and all(isinstance(one, str) for one in packages)
        ):
            raise ConfigurationError(f"expected requirements_txt as a file or a list of strings, got {packages!r}")
        check_labels({} if self.job_labels is None else self.job_labels)
        self._check_image()

    @property
    def requirements(self) -> str | None:
        """The text of the requirements, a line each."""
        given = self.requirements_txt
        if given is None:
            return None
        if not isinstance(given, str | Path):
            return "\n".join([*given, ""])
        try:
            return Path(given).read_text()
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"expected requirements_txt to be text, but {given} is none: {error}") from None

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.job_labels or {})

    @property
    def args(self) -> tuple[str, ...]:
        return tuple(self.entry_point_args or ())

    @property
    def num_workers(self) -> int:
        """Processes that run the script: the workers, or without any the chief itself."""
        return self.worker_count or 1

    @property
    def chosen_strategy(self) -> StrategyName:
        """The automatic table: ps > 0 is ParameterServer, workers > 0 MultiWorkerMirrored; else by the chief's
        accelerators Mirrored (more than one) or OneDevice. A strategy that is given is kept."""
        name = self.distribution_strategy or "auto"
        if self.distribution_strategy == "auto" and self.worker_count and not self.ps_count:
            name = "ring"  # also of one worker
        return choose_strategy(name, self.num_workers, self.ps_count, self.trainer.accelerator_count)

    @property
    def strategy_of_tasks(self) -> str:
        """What the tasks are told: the strategy, or "auto" where the script makes its own."""
        return "auto" if self.distribution_strategy is None else self.chosen_strategy

    @property
    def trainer(self) -> MachineConfig:
        """Machine of each process that runs the script: the worker's, or without workers the chief's."""
        if self.worker_count:
            return machine_of(self.worker_config, "worker_config")
        return machine_of(self.chief_config, "chief_config")

    @property
    def chief(self) -> MachineConfig:
        """Machine of the chief beside workers: it computes no gradient, so its accelerators are not asked for."""
        if self.chief_config == "auto":
            return TASK_MACHINES["chief"]
        machine = machine_of(self.chief_config, "chief_config")
        return dataclasses.replace(machine, accelerator_type="", accelerator_count=0)

    @property
    def ps(self) -> MachineConfig:
        return machine_of(self.ps_config, "ps_config")

    @property
    def devices(self) -> str:
        """STRATAGEM_DEVICES of the tasks: the CPU where no accelerator was asked for; empty: what the task sees."""
        return "" if self.trainer.accelerator_count else "cpu"

    def warning(self) -> str:
        """What is not wrong, and probably not meant; empty: nothing."""
        count = machine_of(self.chief_config, "chief_config").accelerator_count
        if not (self.worker_count and count):
            return ""
        return (
            f"the chief beside workers coordinates and computes nothing: its {count} accelerators are not requested "
            "(in TensorFlow Cloud the chief trains too: there worker_count is one less than here)"
        )

    def _check_strategy(self) -> None:
        name = self.distribution_strategy
        if name is not None and name not in STRATEGIES:
            raise ConfigurationError(
                f"unknown distribution_strategy {name!r}; {nearest(str(name), STRATEGIES)} "
                "(None: the script makes its own)"
            )
        if self.ps_count and not self.worker_count:
            raise ConfigurationError(
                f"expected worker_count of at least 1 with ps_count={self.ps_count}, got 0: parameter servers hold the "
                "variables, workers run the script"
            )
        if name == "ring" and not self.worker_count:
            raise ConfigurationError("expected worker_count of at least 1 with distribution_strategy='ring', got 0")
        if self.chosen_strategy in ONE_PROCESS and self.evaluator:
            raise ConfigurationError(
                "an evaluator needs a cluster, and this job is one process: give worker_count of at least 1"
            )

    def _check_image(self) -> None:
        options = ("docker_base_image", "docker_image_bucket_name", "docker_build_network")
        given = [name for name in options if getattr(self, name) is not None]
        if self.target == "local" and given:
            raise ConfigurationError(
                f"a local job runs as processes of this Python and makes no image: leave {', '.join(given)} out, or "
                "choose target='compose' or 'kubernetes'"
            )
        for name in ("kubernetes_namespace", "kubernetes_storage_class", "kubernetes_access_mode"):
            if self.target != "kubernetes" and (value := getattr(self, name)) is not None:
                raise ConfigurationError(
                    f"{name}={value!r} has no meaning for target={self.target!r}: leave it out, or choose "
                    "target='kubernetes'"
                )
        if self.kubernetes_access_mode is not None:
            refuse_unknown("kubernetes_access_mode", [self.kubernetes_access_mode], ACCESS_MODES)
        if self.target == "kubernetes" and not self.docker_image_bucket_name:
            raise ConfigurationError(
                "target='kubernetes' needs docker_image_bucket_name (--registry): the registry (host[:port]/path) to "
                "which the image is pushed and from which the cluster's nodes pull it"
            )
        if self.docker_image_bucket_name is not None and not _REGISTRY.fullmatch(self.docker_image_bucket_name):
            raise ConfigurationError(
                "expected docker_image_bucket_name to be a registry like 'registry.example:5000/team', got "
                f"{self.docker_image_bucket_name!r}"
            )
        if self.docker_base_image is not None:
            check_image("docker_base_image", self.docker_base_image)


def machine_of(config: object, name: str) -> MachineConfig:
    """The machine of a name or of figures ("4:16"), or the one given; "auto" is "CPU". ConfigurationError: there is no
    such machine; offers the nearest."""
    if isinstance(config, MachineConfig):
        return config
    if not isinstance(config, str):
        raise ConfigurationError(
            f"expected {name} to be 'auto', a name of COMMON_MACHINE_CONFIGS or a MachineConfig, got {config!r}"
        )
    try:
        return parse_machine("CPU" if config == "auto" else config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def check_labels(labels: object) -> dict[str, str]:
    """The labels, by the rules of Kubernetes: a key is ``name`` or ``prefix/name``, the name and the value at most 63
    letters, digits, "-", "_" and ".", with a letter or digit at both ends (a value may be empty), the prefix a DNS
    name. The ConfigurationError names the label, and the rule that it breaks."""
    if not isinstance(labels, Mapping):
        raise ConfigurationError(f"expected job_labels like {{'team': 'vision'}}, got {labels!r}")
    if len(labels) > MAX_LABELS:
        raise ConfigurationError(f"expected at most {MAX_LABELS} job_labels, got {len(labels)}")
    for key, value in labels.items():
        _check_key(key)
        if not isinstance(value, str):
            raise ConfigurationError(
                f"expected text as the value of the label {key!r}, got {value!r}; write {str(value)!r}"
            )
        if value and (len(value) > _MAX_NAME or not _LABEL.fullmatch(value)):
            raise ConfigurationError(f"the label {key}={value!r} has no valid value: {_rule('it')}")
    return dict(labels)


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise ConfigurationError(f"expected text as the key of a label, got {key!r}")
    prefix, slash, name = key.rpartition("/")
    if len(name) > _MAX_NAME or not _LABEL.fullmatch(name):
        raise ConfigurationError(f"the label {key!r} has no valid key: {_rule('its name')}")
    if slash and (len(prefix) > MAX_DNS_NAME or not DNS_NAME.fullmatch(prefix)):
        raise ConfigurationError(
            f"the label {key!r} has no valid prefix: expected a DNS name in lower case, for example example.com/team"
        )
    if prefix in _RESERVED or prefix.endswith((".kubernetes.io", ".k8s.io")):
        raise ConfigurationError(
            f"the label {key!r} is not yours to give: {prefix}/ is reserved; choose another prefix"
        )


def _rule(what: str) -> str:
    return f"{what} takes at most {_MAX_NAME} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
