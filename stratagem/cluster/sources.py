"""Where each value of a role's configuration comes from: flag > environment > YAML > default. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pydantic

from stratagem.arguments import nearest
from stratagem.cluster.config import ChiefConfig, EvaluatorConfig, PsConfig, RoleConfig, WorkerConfig
from stratagem.cluster.spec import ClusterSpec, refuse_unknown
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import TaskPlacement, cluster_variables, placement_from_environment
from stratagem.errors import ClusterSpecError, ConfigurationError

Config = TypeVar("Config", bound=RoleConfig)

CONFIGS: dict[str, type[RoleConfig]] = {
    "chief": ChiefConfig,
    "ps": PsConfig,
    "worker": WorkerConfig,
    "evaluator": EvaluatorConfig,
}
ENV_PREFIX = "STRATAGEM_"
OTHER_VARIABLES = (
    *("STRATAGEM_REPORT_FILE", "STRATAGEM_RESUME_FILE", "STRATAGEM_JOB_", "STRATAGEM_JOINED"),
    *("STRATAGEM_MPI_PYTHON", "STRATAGEM_TF_PYTHON", "STRATAGEM_BENCHMARK_"),
)
"""Variables (or, with "_" at the end, beginnings of variables) with our prefix that are no field of a role: where a
worker writes its report for the launcher, which submitted job this is, who has joined it, and what the
benchmarks use."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Values from one source."""

    origin: str
    """Where they come from, for people."""
    values: Mapping[str, Any]
    """Field name to value."""
    textual: bool = False
    """The values are text to be read as the field's type (environment)."""
    written: Callable[[str], str] | None = None
    """What a field is called there; None: as it is."""


@dataclasses.dataclass(frozen=True)
class Resolved(Generic[Config]):
    """A configuration, and where each value came from."""

    config: Config
    origins: Mapping[str, str]


def flag_of(name: str) -> str:
    """``peer_timeout_s`` is ``--peer-timeout-s``."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """``peer_timeout_s`` is ``STRATAGEM_PEER_TIMEOUT_S``."""
    return ENV_PREFIX + name.upper()


def flag_layer(values: Mapping[str, Any]) -> Layer:
    """The flags that were given; None means "not given"."""
    return Layer("flag", {name: value for name, value in values.items() if value is not None}, written=flag_of)


def environment_layer(model: type[RoleConfig], environ: Mapping[str, str]) -> Layer:
    """The variables ``STRATAGEM_<FIELD>`` of a role; those of other roles are left alone. An empty one is not set:
    docker-compose passes ``${NAME:-}`` so. ConfigurationError: a variable belongs to no role; offers the nearest one
    that does."""
    known = {variable_of(name) for role in CONFIGS.values() for name in role.model_fields}
    for variable in environ:
        other = any(variable == name or (name[-1] == "_" and variable.startswith(name)) for name in OTHER_VARIABLES)
        if variable.startswith(ENV_PREFIX) and variable not in known and not other:
            raise ConfigurationError(
                f"unknown variable {variable}={environ[variable]!r} in the environment; {nearest(variable, known)}"
            )
    names = {name: variable_of(name) for name in model.model_fields}
    values = {name: environ[variable] for name, variable in names.items() if environ.get(variable)}
    return Layer("environment", values, textual=True, written=variable_of)


def file_layers(role: str, document: Mapping[str, Any], file: str) -> list[Layer]:
    """The layers of a cluster file for a role: its own section, then the section ``defaults``. ``document``: the parsed
    YAML: ``cluster``, ``defaults`` and one section per role, each optional. ConfigurationError: an unknown section or
    key."""
    sections = ("cluster", "defaults", *CONFIGS)
    refuse_unknown("section", document, sections, f" in {file}")
    for section, values in document.items():
        if section != "cluster":
            if not isinstance(values, Mapping):
                raise ConfigurationError(f"expected keys and values in section {section!r} of {file}, got {values!r}")
            models = CONFIGS.values() if section == "defaults" else [CONFIGS[section]]
            known = {name for model in models for name in model.model_fields}
            refuse_unknown("key", values, known, f" in section {section!r} of {file}")
    defaults = _known(document.get("defaults", {}), CONFIGS[role])
    return [Layer(f"{file} ({role})", document.get(role, {})), Layer(f"{file} (defaults)", defaults)]


def cluster_layer(cluster: ClusterSpec, task: TaskId, origin: str) -> Layer:
    """What the place of a task in a cluster says about its configuration."""
    values: dict[str, Any] = {"task": str(task), "bind": cluster.bind_address(task)}
    if task.type == "chief":
        values |= {"num_workers": cluster.num_workers, "num_ps": cluster.num_ps}
    else:
        values["chief"] = cluster.chief_address
    if task.type != "evaluator":  # nobody calls it
        values["advertise"] = values["bind"]
    return Layer(origin, values)


def written_cluster(environ: Mapping[str, str], document: Mapping[str, Any], file: str) -> ClusterSpec | None:
    """The cluster of a cluster file, if it has one; a ClusterSpecError when the environment names another."""
    told = placement_from_environment(environ)
    written = ClusterSpec.from_mapping(document["cluster"]) if document.get("cluster") else None
    if told is not None and written is not None and told.cluster != written:
        raise ClusterSpecError(
            f"the environment ({cluster_variables(environ)}) says the cluster is {told.cluster.as_dict()}, but {file} "
            f"says it is {written.as_dict()}; unset one of the two"
        )
    return written


def gather(
    role: str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
    document: Mapping[str, Any] | None = None,
    file: str = "the cluster file",
) -> tuple[Resolved[RoleConfig], TaskPlacement | None]:
    """The configuration of a task of ``role``, and its place in the cluster (None: there is no cluster).

    Args:
        role: None: of whichever task the sources name, and only the fields that every role has.
        environ: the environment (TF_CONFIG, torchrun's variables, ``STRATAGEM_<FIELD>``).
        flags: fields given on the command line; None values count as not given.
        document: the parsed cluster file.

    Raises:
        ConfigurationError: a source is not valid; sources contradict each other about the cluster or the role.
    """
    model, document = RoleConfig if role is None else CONFIGS[role], document or {}
    given, variables = flag_layer(flags or {}), environment_layer(model, environ)
    told = placement_from_environment(environ)
    name = given.values.get("task") or variables.values.get("task") or (told.task if told is not None else None)
    task = TaskId.parse(str(name)) if name is not None else None
    if role is None:
        if task is None:
            raise ClusterSpecError(
                f"which task? Name it: --task ps:0, or {ENV_PREFIX}TASK or TF_CONFIG as the task itself has them"
            )
        role = task.type
    in_file = file_layers(role, document, file)
    written = written_cluster(environ, document, file)
    cluster = told.cluster if told is not None else written
    if task is None and (role in ("chief", "evaluator") or (role == "worker" and cluster is None)):
        task = TaskId(role, 0)
    if task is not None and task.type != role:
        raise ClusterSpecError(f"expected a task of type {role!r}, got {task}; name one with --task {role}:0")
    layers = [given, variables]
    placement = None
    if cluster is None:
        layers += [*in_file, Layer("default", {} if task is None else {"task": str(task)})]
    elif task is None:
        raise ClusterSpecError(f"which {role} of the cluster is this? Name it with --task {role}:0, or in TF_CONFIG")
    else:
        if task != TaskId("chief", 0):
            cluster.check_task(task)
        placement = TaskPlacement(cluster, task)
        origin = f"{file} (cluster)" if told is None else f"environment {cluster_variables(environ)}"
        place = cluster_layer(cluster, task, origin)
        layers += [*in_file, place] if told is None else [place, *in_file]
    if model is RoleConfig:
        layers = [dataclasses.replace(each, values=_known(each.values, model)) for each in layers]
    return resolve(model, layers), placement


def seed_of_job(environ: Mapping[str, str]) -> int:
    """STRATAGEM_SEED, in a job without a chief. ConfigurationError: it is no seed."""
    seed = {name: environ[name] for name in (f"{ENV_PREFIX}SEED",) if name in environ}
    layers = [environment_layer(ChiefConfig, seed), Layer("default", {"num_workers": 1})]
    return resolve(ChiefConfig, layers).config.seed


def _known(values: Mapping[str, Any], model: type[RoleConfig]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in model.model_fields}


def resolve(model: type[Config], layers: Sequence[Layer]) -> Resolved[Config]:
    """The configuration of a role from its sources, strongest first. ConfigurationError: an unknown key, a value of the
    wrong type or range, or a value that nobody gave; says where it came from."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        refuse_unknown("key", layer.values, model.model_fields.keys(), f" in {layer.origin}")
        for name, value in layer.values.items():
            if name not in values:
                origins[name] = f"{layer.origin} {layer.written(name)}" if layer.written else layer.origin
                values[name] = _read(model, name, value, origins[name]) if layer.textual else value
    for name in model.model_fields:
        origins.setdefault(name, "default")
    try:
        return Resolved(model(**values), origins)
    except pydantic.ValidationError as error:
        raise ConfigurationError(_explain(error, origins)) from None


def _read(model: type[RoleConfig], name: str, text: str, origin: str) -> Any:
    annotation: Any = model.model_fields[name].annotation
    try:
        return pydantic.TypeAdapter(annotation).validate_python(text, strict=False)
    except pydantic.ValidationError as error:
        raise ConfigurationError(_explain(error, {name: origin}, name)) from None


def _explain(error: pydantic.ValidationError, origins: Mapping[str, str], name: str = "") -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"] and not name:  # what a validator of the whole says: fields that do not go together
        return str(first["ctx"]["error"])
    field = name or str(first["loc"][0])
    if first["type"] == "missing":
        words = f"no flag ({flag_of(field)}), variable ({variable_of(field)}) or cluster file gives it"
        return f"{field} is needed, but {words}"
    message = first["msg"][0].lower() + first["msg"][1:] + f", got {first['input']!r}"
    return f"{field} from {origins.get(field, 'default')}: {first.get('ctx', {}).get('error', message)}"
