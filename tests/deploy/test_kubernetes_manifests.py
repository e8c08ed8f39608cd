"""The kustomize base, the Helm chart and `stratagem render` say the same, and three versions of Kubernetes take it."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import kubernetes_validate
import pytest

from stratagem.cli.render import VARIABLES_OF_THE_OBJECTS
from stratagem.launch.machines import MachineConfig
from stratagem.launch.manifests import jobset, kubernetes
from stratagem.launch.manifests.pod import pod_failure_policy
from stratagem.launch.manifests.workload import Workload
from tests.deploy.kubernetes_tools import CHART, Tools, unpacked, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

Objects = list[dict[str, Any]]
VERSIONS = ("1.25", "1.31", "1.37")
"""The oldest that kubernetes-validate knows, one between, the newest."""
OVERLAYS = (
    "overlays/gpu",
    "overlays/kubernetes-1.26",
    "overlays/one-node",
    "overlays/spot",
    "overlays/tls",
    "overlays/web",
)
DIGITS = Workload(
    "digits",
    "stratagem:latest",
    "examples/digits.py",
    ("--epochs", "20", "--export", "/var/lib/stratagem/digits.pt"),
    num_workers=2,
    num_ps=2,
    checkpoint_every_s=30,
)
RING = dataclasses.replace(
    DIGITS,
    num_ps=0,
    num_workers=3,
    evaluator=True,
    checkpoint_every_s=0.0,
    environment={"HOME": "/work", "OMP_NUM_THREADS": "3"},
)
ALONE = dataclasses.replace(
    DIGITS, num_ps=0, num_workers=1, checkpoint_every_s=0.0, worker=MachineConfig(8, 30, "nvidia-tesla-t4", 4)
)


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with unpacked() as programs:
        yield programs


def by_name(objects: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for each in objects:
        each["metadata"].pop("annotations", None)  # the chart's: what Helm needs to see that a pod would change
    named = {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}
    assert len(named) == len(objects)
    return named


def validate(objects: Sequence[dict[str, Any]], version: str) -> None:
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def jobs_inside(spec: dict[str, Any]) -> Objects:
    """The Jobs that a controller makes of a JobSet's spec."""
    metadata = {"metadata": {"name": "job"}}
    replicated = (each["template"]["spec"] for each in spec["replicatedJobs"])
    return [{"apiVersion": "batch/v1", "kind": "Job", **metadata, "spec": job} for job in replicated]


def test_base_chart_and_renderer_say_the_same(tools: Tools) -> None:
    rendered = by_name(kubernetes.render(DIGITS))
    assert by_name(tools.kustomize("base")) == rendered
    assert by_name(tools.template("digits")) == rendered


def test_tls(tools: Tools) -> None:
    rendered = by_name(kubernetes.render(dataclasses.replace(DIGITS, tls_secret="digits-tls")))
    assert by_name(tools.kustomize("overlays/tls")) == rendered
    assert by_name(tools.template("digits", tlsSecret="digits-tls")) == rendered
    assert "STRATAGEM_INSECURE" not in rendered["ConfigMap/digits"]["data"]


def test_names_that_yaml_takes_for_something_else(tools: Tools) -> None:
    workload = dataclasses.replace(DIGITS, name="on", tls_secret="no", storage_class="off")
    values = {"tlsSecret": "no", "volume": {"storageClassName": "off"}}
    assert by_name(tools.template("on", **values)) == by_name(kubernetes.render(workload))
    assert "ServiceAccount/on" in by_name(tools.template("on", **values, kubernetes126=True))


@pytest.mark.parametrize("secret", ["", "digits-tls"])
def test_the_page_stays_in_the_pod_where_it_is_not_encrypted(tools: Tools, secret: str) -> None:
    workload = dataclasses.replace(DIGITS, web=8080, tls_secret=secret, token_secret="t")
    rendered = by_name(kubernetes.render(workload))
    assert by_name(tools.template("digits", web=8080, tlsSecret=secret, tokenSecret="t")) == rendered
    settings = rendered["ConfigMap/digits"]["data"]
    assert settings["STRATAGEM_WEB"] == ("0.0.0.0:8080" if secret else "127.0.0.1:8080")
    assert settings["STRATAGEM_TOKEN_FILE"] and ("STRATAGEM_TLS" in settings) == bool(secret)
    ports = {
        name: [port["name"] for port in each["spec"]["template"]["spec"]["containers"][0]["ports"]]
        for name, each in rendered.items()
        if each["kind"] == "Job"
    }
    assert ports.pop("Job/digits-chief-0") == (["grpc", "web"] if secret else ["grpc"])
    assert set(map(tuple, ports.values())) == {("grpc",)}
    rules = rendered["NetworkPolicy/digits"]["spec"]["ingress"]
    assert rules[1:] == ([{"ports": [{"port": "web"}]}] if secret else [])
    for version in VERSIONS:
        validate([*rendered.values()], version)


def test_the_page_of_the_base(tools: Tools) -> None:
    assert by_name(tools.kustomize("overlays/web")) == by_name(kubernetes.render(dataclasses.replace(DIGITS, web=8080)))


def test_gpus(tools: Tools) -> None:
    rendered = by_name(kubernetes.render(dataclasses.replace(DIGITS, worker=MachineConfig(0.4, 1, "", 1))))
    assert by_name(tools.kustomize("overlays/gpu")) == rendered
    assert by_name(tools.template("digits", worker={"acceleratorCount": 1})) == rendered


@pytest.mark.parametrize(
    ("workload", "values"),
    [
        (
            dataclasses.replace(
                DIGITS,
                args=("$(HOME)", "a$$b"),
                token_secret="t",
                staleness=0.0,
                labels={"team": "a"},
                port=4000,
                num_workers=1,
                volume_gib=2,
                access_mode="ReadWriteOnce",
                storage_class="fast",
            ),
            {
                "args": ["$(HOME)", "a$$b"],
                "tokenSecret": "t",
                "staleness": 0,
                "labels": {"team": "a"},
                "port": 4000,
                "worker": {"count": 1},
                "volume": {"sizeGib": 2, "accessMode": "ReadWriteOnce", "storageClassName": "fast"},
            },
        ),
        (
            RING,
            {
                "ps": {"count": 0},
                "checkpointEveryS": 0,
                "worker": {"count": 3},
                "evaluator": True,
                "environment": {"HOME": "/work", "OMP_NUM_THREADS": "3"},
            },
        ),
        (
            ALONE,
            {
                "ps": {"count": 0},
                "checkpointEveryS": 0,
                "worker": {
                    "count": 1,
                    "cpuCores": 8,
                    "memoryGib": 30,
                    "acceleratorCount": 4,
                    "acceleratorType": "nvidia-tesla-t4",
                },
            },
        ),
    ],
)
def test_chart_and_renderer_agree_on_other_jobs(tools: Tools, workload: Workload, values: dict[str, Any]) -> None:
    assert by_name(tools.template("digits", **values)) == by_name(kubernetes.render(workload))


def test_newer_features_and_spot_nodes(tools: Tools) -> None:
    newer = by_name(tools.kustomize("overlays/kubernetes-1.26"))
    assert by_name(tools.template("digits", kubernetes126=True)) == newer
    policies = [each["spec"]["podFailurePolicy"] for each in newer.values() if each["kind"] == "Job"]
    assert policies == [pod_failure_policy()] * 5
    rendered = by_name(kubernetes.render(DIGITS, exit_codes=True))
    jobs = {name: each["spec"] for name, each in newer.items() if each["kind"] == "Job"}
    assert {name: {**rendered[name]["spec"], "ttlSecondsAfterFinished": 86400} for name in jobs} == jobs
    spot = by_name(tools.kustomize("overlays/spot"))
    pod = spot["Job/digits-worker-0"]["spec"]["template"]["spec"]
    fields = {name: pod[name] for name in ("tolerations", "affinity")}
    chart = by_name(tools.template("digits", workerPod=fields))["Job/digits-worker-0"]["spec"]["template"]["spec"]
    assert chart == pod
    assert "tolerations" not in spot["Job/digits-ps-0"]["spec"]["template"]["spec"]


def test_every_pod_is_restricted(tools: Tools) -> None:
    for folder in ("base", *OVERLAYS):
        jobs = [each for each in tools.kustomize(folder) if each["kind"] == "Job"]
        assert len(jobs) == 5
        for pod in (job["spec"]["template"]["spec"] for job in jobs):
            (container,) = pod["containers"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["livenessProbe"]["exec"] != container["readinessProbe"]["exec"]
            for probe in (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")):
                assert probe["exec"]["command"][:2] == ["timeout", str(probe["timeoutSeconds"])]
            assert pod["terminationGracePeriodSeconds"] >= 30  # a worker gives itself 20 s to save, see preemption.md


@pytest.mark.parametrize(
    "version", [*(pytest.param(old, marks=pytest.mark.thorough) for old in VERSIONS[:2]), VERSIONS[2]]
)
def test_every_manifest_is_valid(tools: Tools, version: str) -> None:
    base = tools.kustomize("base")
    validate(base, version)
    for folder in OVERLAYS:
        changed = [each for each in tools.kustomize(folder) if each not in base]
        assert changed
        validate(changed, version)
    for workload in (RING, ALONE):
        validate(kubernetes.render(workload), version)
        for render in (jobset.render, jobset.render_trainjob):
            *shared, last = [each for each in render(workload) if each["kind"] != "TrainJob"]
            spec = last["spec"] if last["kind"] == "JobSet" else last["spec"]["template"]["spec"]
            jobs = jobs_inside(spec)
            assert jobs
            validate([*shared, *jobs], version)


def test_validation_notices_a_field_that_is_not_there(tools: Tools) -> None:
    base = tools.kustomize("base")
    job = next(each for each in base if each["kind"] == "Job")
    job["spec"]["template"]["spec"]["hostnames"] = "x"
    with pytest.raises(Exception, match="hostnames"):
        validate(base, VERSIONS[0])


def test_the_base_needs_nothing_newer_than_1_20(tools: Tools) -> None:
    # Seen valid by kubernetes-validate 1.20.0 --strict; what came later must not slip in.
    for each in tools.kustomize("base"):
        assert each["apiVersion"] in ("v1", "batch/v1", "networking.k8s.io/v1"), each["kind"]
        assert each["kind"] != "CronJob"
        if each["kind"] == "Job":
            assert set(each["spec"]) == {"backoffLimit", "template"}
            assert each["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"


def test_lint(tools: Tools) -> None:
    assert "0 chart(s) failed" in tools.helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize(
    ("release", "values", "words"),
    [
        ("digits", {"worker": {"count": 0}}, "worker/count"),
        ("digits", {"worker": {"cuont": 2}}, "cuont"),
        ("digits", {"worker": {"memoryGib": 0.0001}}, "memoryGib"),
        ("digits", {"strategy": "fast"}, "strategy"),
        ("digits", {"staleness": -1}, "staleness"),
        ("digits", {"imge": "x"}, "imge"),
        ("digits", {"staleness": None}, "missing property 'staleness'"),
        ("digits", {"args": None}, "missing property 'args'"),
        ("digits", {"environment": None}, "missing property 'environment'"),
        ("digits", {"web": 70_000}, "web"),
        ("digits", {"web": 2222}, "a port for the page other than 2222"),
        ("digits", {"web": 8080, "ps": {"count": 0}, "worker": {"count": 1}}, "the chief serves the page"),
        ("digits", {"strategy": "ring"}, "the strategy ring trains without parameter servers"),
        ("digits", {"strategy": "ps", "ps": {"count": 0}}, "the strategy ps needs ps.count of at least 1"),
        ("digits", {"strategy": "one", "ps": {"count": 0}}, "the strategy one trains in one process"),
        ("x" * 41, {}, "release name of at most 40"),
        ("digits", {"port": 80}, "port"),
        ("digits", {"web": 80}, "web"),
        ("digits", {"staleness": 3, "ps": {"count": 0}}, "a staleness of 3 needs parameter servers"),
        ("digits", {"tokenSecret": "t", "ps": {"count": 0}, "worker": {"count": 1}}, "has no use for tlsSecret"),
        ("digits", {"environment": {"STRATAGEM_STALENESS": "0"}}, "say it by staleness"),
    ],
)
def test_the_chart_refuses(tools: Tools, release: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        tools.template(release, **values)
    assert words in refused.value.stderr


@pytest.mark.parametrize("name", VARIABLES_OF_THE_OBJECTS)
def test_the_chart_refuses_the_variables_that_the_renderer_refuses(tools: Tools, name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        tools.template("digits", environment={name: "1"})
    assert f"environment.{name}: the tasks are told theirs by other means" in refused.value.stderr


def test_a_volume_of_a_million_gib(tools: Tools) -> None:
    volume = by_name(tools.template("digits", volume={"sizeGib": 1_000_000}))["PersistentVolumeClaim/digits"]
    assert volume["spec"]["resources"]["requests"]["storage"] == "1000000Gi"


def test_a_worker_that_is_added_changes_no_job(tools: Tools) -> None:
    before, after = by_name(tools.template("digits")), by_name(tools.template("digits", worker={"count": 3}))
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {"ConfigMap/digits", "Job/digits-worker-2"}
