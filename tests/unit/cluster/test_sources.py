"""Flag > environment > YAML > default, with provenance; unknown keys offer the nearest known one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stratagem.cluster.config import ChiefConfig, PsConfig, RoleConfig, WorkerConfig
from stratagem.cluster.sources import (
    CONFIGS,
    Layer,
    cluster_layer,
    environment_layer,
    file_layers,
    flag_layer,
    gather,
    resolve,
)
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import TaskPlacement, emit_tf_config
from stratagem.errors import ConfigurationError

DOCUMENT = {"defaults": {"num_threads": 4, "session_timeout_s": 9.0}, "ps": {"peer_timeout_s": 1}}


def test_order_and_provenance() -> None:
    environ = {"STRATAGEM_PEER_TIMEOUT_S": "2", "STRATAGEM_NUM_THREADS": "3", "STRATAGEM_STALENESS": "1", "PATH": "x"}
    layers = [
        flag_layer({"peer_timeout_s": 3.0, "num_threads": None, "task": "ps:0"}),
        environment_layer(PsConfig, environ),
        *file_layers("ps", DOCUMENT, "c.yaml"),
    ]
    resolved = resolve(PsConfig, layers)
    assert (resolved.config.peer_timeout_s, resolved.config.num_threads) == (3.0, 3)
    assert resolved.origins["peer_timeout_s"] == "flag --peer-timeout-s"
    assert resolved.origins["num_threads"] == "environment STRATAGEM_NUM_THREADS"
    assert resolved.origins["bind"] == "default"
    weaker = resolve(PsConfig, [Layer("flag", {"task": "ps:0"}), *file_layers("ps", DOCUMENT, "c.yaml")])
    assert (weaker.config.peer_timeout_s, weaker.config.num_threads) == (1, 4)
    assert weaker.origins["peer_timeout_s"] == "c.yaml (ps)"
    assert weaker.origins["num_threads"] == "c.yaml (defaults)"


def test_environment_is_read_as_the_field_s_type() -> None:
    environ = {"STRATAGEM_STALENESS": "inf", "STRATAGEM_INSECURE": "true", "STRATAGEM_TASK": "worker:0"}
    config = resolve(WorkerConfig, [environment_layer(WorkerConfig, environ)]).config
    assert math.isinf(config.staleness)
    assert config.insecure is True


@pytest.mark.parametrize("role", CONFIGS.values())
def test_an_empty_variable_is_not_set(role: type[RoleConfig]) -> None:
    """docker-compose passes what has no value so; of a number it was refused, of a path it hid the cluster file's."""
    environ = {f"STRATAGEM_{name.upper()}": "" for name in role.model_fields}
    assert environment_layer(role, environ).values == {}


def test_folders_are_those_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layers = [environment_layer(WorkerConfig, {"STRATAGEM_CHECKPOINT_DIR": "ck", "STRATAGEM_TASK": "worker:0"})]
    config = resolve(WorkerConfig, layers).config
    assert (config.checkpoint_dir, config.tls) == (str(tmp_path / "ck"), "")


@pytest.mark.parametrize("role", CONFIGS)
def test_every_field_can_come_from_the_environment(role: str) -> None:
    model = CONFIGS[role]
    layer = environment_layer(model, {f"STRATAGEM_{name.upper()}": "1" for name in model.model_fields})
    assert set(layer.values) == set(model.model_fields)


@pytest.mark.parametrize(
    "name",
    ["max_message_bytes", "max_connections", "max_calls", "max_calls_per_peer", "num_workers", "num_ps", "seed"],
)
def test_a_number_that_nobody_has_room_for_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} from flag: input should be less than"):
        resolve(ChiefConfig, [Layer("flag", {"num_workers": 1, name: 1 << 64})])


@pytest.mark.parametrize("model", [ChiefConfig, PsConfig, WorkerConfig])
def test_every_field_says_what_it_is(model: type[RoleConfig]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_unknown_variable() -> None:
    with pytest.raises(ConfigurationError, match=r"STRATAGEM_STALNESS='1'.*did you mean 'STRATAGEM_STALENESS'"):
        environment_layer(PsConfig, {"STRATAGEM_STALNESS": "1"})


def test_an_empty_task_is_none() -> None:
    told = emit_tf_config(ClusterSpec(worker=("h:1", "h:2")), TaskId("worker", 1))
    assert gather("worker", {"STRATAGEM_TASK": "", "TF_CONFIG": told})[0].config.task == "worker:1"


def test_variables_of_others_are_left_alone() -> None:
    environ = {"STRATAGEM_REPORT_FILE": "r", "STRATAGEM_BENCHMARK_RESULT": "x", "STRATAGEM_SESSION_TIMEOUT_S": "1"}
    environ |= {"STRATAGEM_TF_PYTHON": "python", "STRATAGEM_MPI_PYTHON": "python"}
    assert environment_layer(PsConfig, environ).values == {}
    with pytest.raises(ConfigurationError, match="unknown variable STRATAGEM_REPORT_FILES"):
        environment_layer(PsConfig, {"STRATAGEM_REPORT_FILES": "r"})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"chef": {}}, "unknown section 'chef' in c.yaml; did you mean 'chief'"),
        ({"ps": {"peer_timeout": 1}}, "unknown key 'peer_timeout' in section 'ps' of c.yaml; did you mean"),
        ({"defaults": {"bnd": 1}}, "unknown key 'bnd' in section 'defaults' of c.yaml; did you mean 'bind'"),
        ({"ps": 3}, "expected keys and values in section 'ps' of c.yaml, got 3"),
    ],
)
def test_file_refused(document: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        file_layers("worker", document, "c.yaml")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Layer("c.yaml", {"peer_timeout_s": "soon"}), "peer_timeout_s from c.yaml: .*number, got 'soon'"),
        (Layer("c{1}.yaml", {"num_threads": 0}), r"num_threads from c\{1\}.yaml: .*got 0"),
        (Layer("c.yaml", {"insecure": "yes"}), "insecure from c.yaml: .*boolean, got 'yes'"),
        (Layer("env", {"num_threads": "0"}, True, str.upper), "num_threads from env NUM_THREADS: .*got 0"),
        (Layer("env", {"num_threads": "x"}, True, str.upper), "num_threads from env NUM_THREADS: .*got 'x'"),
        (Layer("c.yaml", {"log_format": "xml"}), "log_format from c.yaml: .*'text' or 'json'.*'xml'"),
        (Layer("c.yaml", {"color": "red"}), "unknown key 'color' in c.yaml"),
    ],
)
def test_wrong_values_name_their_source(layer: Layer, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(PsConfig, [flag_layer({"task": "ps:0"}), layer])


def test_missing_value() -> None:
    with pytest.raises(ConfigurationError, match=r"num_workers is needed.*--num-workers\).*\(STRATAGEM_NUM_WORKERS\)"):
        resolve(ChiefConfig, [])


def test_what_a_cluster_says() -> None:
    cluster = ClusterSpec(worker=("a:1", "b:1"), ps=("p:1",), evaluator=("e:1",))
    chief = resolve(ChiefConfig, [cluster_layer(cluster, TaskId("chief", 0), "TF_CONFIG")])
    assert (chief.config.num_workers, chief.config.num_ps) == (2, 1)
    assert (chief.config.bind, chief.origins["bind"], chief.config.chief) == ("a:1", "TF_CONFIG", "")
    worker = resolve(WorkerConfig, [cluster_layer(cluster, TaskId("worker", 0), "TF_CONFIG")])
    assert (worker.config.task, worker.config.bind, worker.config.chief) == ("worker:0", "a:0", "a:1")


CLUSTER = ClusterSpec(chief=("c:1",), worker=("a:1", "b:1"), ps=("p:1",))


def test_gather_from_the_environment() -> None:
    environ = {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("worker", 1)), "STRATAGEM_STALENESS": "2"}
    resolved, placement = gather("worker", environ)
    assert isinstance(resolved.config, WorkerConfig)
    assert (resolved.config.task, resolved.config.chief, resolved.config.staleness) == ("worker:1", "c:1", 2.0)
    assert resolved.origins["chief"] == "environment TF_CONFIG"
    assert placement == TaskPlacement(CLUSTER, TaskId("worker", 1))


def test_gather_from_a_file() -> None:
    document = {"cluster": CLUSTER.as_dict(), "ps": {"bind": "0.0.0.0:9"}}
    resolved, _ = gather("ps", {}, {"task": "ps:0", "num_threads": 2}, document, "c.yaml")
    assert isinstance(resolved.config, PsConfig)
    assert (resolved.config.bind, resolved.config.chief, resolved.config.num_threads) == ("0.0.0.0:9", "c:1", 2)
    assert (resolved.origins["bind"], resolved.origins["chief"]) == ("c.yaml (ps)", "c.yaml (cluster)")


def test_gather_without_a_cluster_is_local() -> None:
    resolved, placement = gather("worker", {})
    assert (resolved.config.task, resolved.config.chief, placement) == ("worker:0", "", None)


def test_worker_0_can_start_the_chief_it_owns() -> None:
    cluster = ClusterSpec(worker=("a:1",), ps=("p:1",))
    environ = {"TF_CONFIG": emit_tf_config(cluster, TaskId("worker", 0))}
    resolved, _ = gather("chief", environ, {"task": "chief:0"})
    assert (resolved.config.task, resolved.config.bind) == ("chief:0", "a:1")


@pytest.mark.parametrize(
    ("role", "environ", "flags", "document", "words"),
    [
        ("ps", {}, {}, {"cluster": CLUSTER.as_dict()}, "which ps of the cluster is this"),
        ("ps", {}, {"task": "worker:0"}, {}, "expected a task of type 'ps', got worker:0"),
        ("ps", {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("worker", 0))}, {}, {}, "type 'ps', got worker:0"),
        ("ps", {}, {"task": "ps:1"}, {"cluster": CLUSTER.as_dict()}, "ps:1 is not in the cluster, which has 1"),
        (
            "ps",
            {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("ps", 0))},
            {},
            {"cluster": {"worker": ["z:1"]}},
            "TF_CONFIG.*c:1.*c.yaml says.*z:1",
        ),
        ("ps", {}, {}, {}, "task is needed"),
    ],
)
def test_gather_refuses(
    role: str, environ: dict[str, str], flags: dict[str, str], document: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        gather(role, environ, flags, document, "c.yaml")


def test_fields_that_do_not_go_together() -> None:
    with pytest.raises(ConfigurationError, match=r"^a standby chief takes over from a journal"):
        gather("chief", {}, {"num_workers": 1, "standby": True})
    with pytest.raises(ConfigurationError, match=r"^heartbeat_interval_s 30 has to be less than session_timeout_s 6"):
        gather("chief", {}, {"num_workers": 1, "heartbeat_interval_s": 30.0})
    with pytest.raises(ConfigurationError, match=r"^ps_replicas 2 needs as many ps"):
        gather("chief", {}, {"num_workers": 1, "num_ps": 1, "ps_replicas": 2})
    with pytest.raises(ConfigurationError, match=r"^max_connections 4 is too few: each of 2 workers and 1 ps"):
        gather("chief", {"STRATAGEM_MAX_CONNECTIONS": "4"}, {"num_workers": 2, "num_ps": 1})
    with pytest.raises(ConfigurationError, match=r"^stripes 1000 has to be less than max_lanes_per_peer 128"):
        gather("worker", {}, {"chief": "h:1", "stripes": 1000})
    with pytest.raises(ConfigurationError, match=r"^checkpoint_every_s 5 needs a place for the checkpoints"):
        gather("chief", {}, {"num_workers": 1, "num_ps": 1, "checkpoint_every_s": 5.0})
    odd = {"num_workers": 2, "checkpoint_dir": "/a\udce4"}  # as os.fsdecode reads a byte that is no UTF-8
    gather("chief", {}, odd)  # without ps nobody is told
    with pytest.raises(ConfigurationError, match=r"^'/a\\udce4' cannot be told to other tasks"):
        gather("chief", {}, {**odd, "num_ps": 1})
