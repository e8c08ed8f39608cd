"""Jobs on a Kubernetes API server (kmock): what is created, found, read and deleted, by the real client."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kmock import Request
from urllib3.exceptions import InsecureRequestWarning

from stratagem.errors import ConfigurationError, SubmitError
from stratagem.launch.manifests.kubernetes import render
from stratagem.launch.manifests.workload import Workload
from stratagem.launch.submit import kubernetes_target, submission
from stratagem.launch.submit.kubernetes_client import Cluster
from stratagem.launch.submit.kubernetes_target import FILE
from stratagem.launch.submit.record import JobRecord, JobState, JobStore
from tests.unit.launch.submit.api_server import CLAIMS, JOBS, NAMESPACE, ApiServer, api_server

WORKLOAD = Workload(
    name="digits-1", image=f"registry.example/digits@sha256:{'1' * 64}", script="train.py", num_workers=2, num_ps=1
)
OBJECTS = render(WORKLOAD)


def ended(code: int) -> dict[str, object]:
    """The status of a pod whose container has ended."""
    state = {"terminated": {"exitCode": code}}
    fields = {"name": "task", "image": "x", "imageID": "", "ready": False, "lastState": {}}
    return {"phase": "Failed", "containerStatuses": [{**fields, "state": state, "restartCount": 0}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path) as server:
        yield server


@pytest.fixture
def cluster(server: ApiServer) -> Iterator[Cluster]:
    cluster = Cluster(kubeconfig=str(server.kubeconfig))
    yield cluster
    cluster.close()


@pytest.fixture
def record(server: ApiServer, cluster: Cluster, tmp_path: Path) -> JobRecord:
    """A submitted job."""
    cluster.create(OBJECTS)
    (tmp_path / FILE).write_text(yaml.safe_dump_all(OBJECTS))
    place = {"context": "test", "namespace": NAMESPACE, "kubeconfig": str(server.kubeconfig)}
    return JobRecord(
        id="digits-1",
        target="kubernetes",
        entry_point="train.py",
        strategy="ps",
        num_workers=2,
        num_ps=1,
        created_at="2026-01-01T00:00:00+00:00",
        place=place,
    )


def test_what_is_posted_is_what_render_shows(server: ApiServer, cluster: Cluster) -> None:
    assert (cluster.context, cluster.namespace) == ("test", NAMESPACE)
    cluster.create(OBJECTS)
    assert server.posted == OBJECTS


def test_a_namespace_that_is_not_there_is_noticed_at_once(server: ApiServer, cluster: Cluster) -> None:
    read = server.handler[f"get /api/v1/namespaces/{NAMESPACE}"]
    read << 403 << {"message": "not yours"}
    cluster.check_namespace()
    cluster.namespace = "nowhere"
    server.handler["get /api/v1/namespaces/nowhere"] << 404 << {"message": 'namespaces "nowhere" not found'}
    with pytest.raises(SubmitError, match=r'use the namespace nowhere \(`kubectl .* 404 namespaces "nowhere'):
        cluster.check_namespace()


def test_missing_rights_are_said_before_an_image_is_built(server: ApiServer, cluster: Cluster) -> None:
    asked: list[dict[str, str]] = []

    def answer(request: Request) -> dict[str, Any]:
        asked.append(request.data["spec"]["resourceAttributes"])
        return {"spec": {}, "status": {"allowed": False}}

    server.handler["post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"] << answer
    policies = [one for one in OBJECTS if one["kind"] == "NetworkPolicy"]
    words = rf"not let you create networkpolicies in the namespace {NAMESPACE}, .* auth can-i"
    with pytest.raises(SubmitError, match=words):
        cluster.check_rights(policies)
    wanted = {"namespace": NAMESPACE, "verb": "create", "group": "networking.k8s.io", "resource": "networkpolicies"}
    assert asked == [wanted]


def test_a_server_that_does_not_say_what_may_be_created_says_so_later(server: ApiServer, cluster: Cluster) -> None:
    cluster.check_rights(OBJECTS)


def test_a_refused_object_takes_back_the_others(server: ApiServer, cluster: Cluster) -> None:
    server.refuse("jobs", 'jobs "x" is forbidden: no quota')
    with pytest.raises(SubmitError, match='would not create Job digits-1-chief-0: 403 jobs "x" is forbidden: no quota'):
        cluster.create(OBJECTS)
    assert len(server.posted) > 3
    # kmock keeps what it was told to refuse.
    assert {kind for kind, _ in server.names} <= {"Job"}


def test_an_interrupt_takes_back_also_what_was_just_being_created(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = cluster._call

    def interrupted(verb: str, api_version: str, kind: str, **arguments: Any) -> dict[str, Any]:
        answer = call(verb, api_version, kind, **arguments)
        if (verb, kind) == ("create", "Job"):
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(cluster, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.create(OBJECTS)
    assert server.posted[-1]["kind"] == "Job" and not server.names


def test_who_may_not_delete_hears_what_was_refused_first_and_what_stays(server: ApiServer, cluster: Cluster) -> None:
    server.refuse("jobs", "no job for you")
    path = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies/digits-1"
    server.handler[f"delete {path}"] << 403 << {"message": "no deletion"}
    with pytest.raises(SubmitError) as caught:
        cluster.create(OBJECTS)
    assert str(caught.value).startswith("the cluster would not create Job digits-1-chief-0: 403 no job for you; ")
    assert f"`kubectl --namespace {NAMESPACE} delete NetworkPolicy/digits-1`" in str(caught.value)


def test_a_cluster_whose_certificate_is_not_to_be_checked_is_no_warning_at_each_call(server: ApiServer) -> None:
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    server.kubeconfig.write_text(yaml.safe_dump(config))
    with warnings.catch_warnings():
        Cluster(kubeconfig=str(server.kubeconfig)).close()
        warnings.warn("as urllib3 does", InsecureRequestWarning, stacklevel=1)


def test_the_state_is_that_of_the_jobs(server: ApiServer, record: JobRecord, tmp_path: Path) -> None:
    assert kubernetes_target.state(record, tmp_path).phase == "pending"
    for task in ("chief-0", "ps-0", "worker-0", "worker-1"):
        server.set_status(JOBS, f"digits-1-{task}", active=1)
        server.add_pod(f"digits-1-{task}", f"digits-1-{task}-abc", task[:-2], "digits-1", {"phase": "Running"})
    running = kubernetes_target.state(record, tmp_path)
    assert running.phase == "running" and "worker-1 Running" in running.detail
    for task in ("worker-0", "worker-1"):
        server.set_status(JOBS, f"digits-1-{task}", active=0, conditions=[{"type": "Complete", "status": "True"}])
    assert kubernetes_target.state(record, tmp_path) == JobState("succeeded", 0)


def test_a_job_whose_worker_was_deleted_has_not_succeeded(
    server: ApiServer, cluster: Cluster, record: JobRecord, tmp_path: Path
) -> None:
    cluster.delete([each for each in OBJECTS if each["metadata"]["name"] == "digits-1-worker-0"])
    server.set_status(JOBS, "digits-1-worker-1", active=0, conditions=[{"type": "Complete", "status": "True"}])
    server.add_pod("digits-1-ps-0", "digits-1-ps-0-abc", "ps", "digits-1", {"phase": "Running"})
    state = kubernetes_target.state(record, tmp_path)
    assert (state.phase, state.exit_code) == ("running", None)
    assert state.detail.endswith("; the Job digits-1-worker-0 is gone: cancel the job")


def test_a_failed_job_has_the_exit_code_of_the_task_that_failed_first(
    server: ApiServer, record: JobRecord, tmp_path: Path
) -> None:
    for task, code in (("chief-0", 1), ("worker-1", 42)):
        server.set_status(JOBS, f"digits-1-{task}", conditions=[{"type": "Failed", "status": "True"}])
        server.add_pod(f"digits-1-{task}", f"digits-1-{task}-abc", task[:-2], "digits-1", ended(code))
    state = kubernetes_target.state(record, tmp_path)
    assert (state.phase, state.exit_code, state.detail) == ("failed", 42, "worker-1 has failed")


def test_a_task_that_is_not_to_be_tried_again_ends_the_job_also_where_the_cluster_tries_it(
    server: ApiServer, record: JobRecord, tmp_path: Path
) -> None:
    for task, code in (("chief-0", 42), ("worker-1", 42), ("ps-0", 1)):
        last = {"terminated": {"exitCode": code}}
        status = {"name": "task", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last}
        pod = {"phase": "Running", "containerStatuses": [{**status, "restartCount": 1}]}
        server.add_pod(f"digits-1-{task}", f"digits-1-{task}-abc", task[:-2], "digits-1", pod)
    state = kubernetes_target.state(record, tmp_path)
    words = "worker-1 has failed, and a restart would not help: `stratagem jobs remove digits-1` removes what is left"
    assert state == JobState("failed", 42, words)


def test_a_task_that_was_started_again_says_so_while_it_runs(
    server: ApiServer, record: JobRecord, tmp_path: Path
) -> None:
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    status = {"name": "task", "state": {"running": {}}, "lastState": last, "restartCount": 3}
    pod = {"phase": "Running", "containerStatuses": [status]}
    server.add_pod("digits-1-ps-0", "digits-1-ps-0-abc", "ps", "digits-1", pod)
    detail = kubernetes_target.state(record, tmp_path).detail
    assert detail == "ps-0 Running (restarts: 3) (OOMKilled: it needs more memory)"


def test_a_container_that_cannot_start_says_why(server: ApiServer, record: JobRecord, tmp_path: Path) -> None:
    last = {"terminated": {"exitCode": 127, "reason": "ContainerCannotRun", "message": "no such program"}}
    status = {"name": "task", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last}
    pod = {"phase": "Running", "containerStatuses": [{**status, "restartCount": 1}]}
    server.add_pod("digits-1-ps-0", "digits-1-ps-0-abc", "ps", "digits-1", pod)
    detail = kubernetes_target.state(record, tmp_path).detail
    assert detail.endswith("; it ended with ContainerCannotRun, exit code 127: no such program")


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_is_not_there_has_its_cause_between_two_tries_too(
    server: ApiServer, record: JobRecord, tmp_path: Path, reason: str
) -> None:
    container = {"name": "task", "restartCount": 0, "state": {"waiting": {"reason": reason, "message": "Back-off"}}}
    server.add_pod(
        "digits-1-ps-0", "digits-1-ps-0-abc", "ps", "digits-1", {"phase": "Pending", "containerStatuses": [container]}
    )
    messages = ["Failed to pull image: no such host", f"Error: {reason}"]
    events = [{"reason": "Failed", "type": "Warning", "message": said, "metadata": {}} for said in messages]
    server.handler[f"get /api/v1/namespaces/{NAMESPACE}/events"] << {"items": events}
    detail = kubernetes_target.state(record, tmp_path).detail
    assert "; ps-0: ErrImagePull: Failed to pull image: no such host; " in detail


def test_pods_that_a_quota_refuses_and_an_old_reason_of_a_pod_with_a_node(
    server: ApiServer, record: JobRecord, tmp_path: Path
) -> None:
    container = {"name": "task", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}
    server.add_pod(
        "digits-1-ps-0", "digits-1-ps-0-abc", "ps", "digits-1", {"phase": "Pending", "containerStatuses": [container]}
    )
    said = {
        "FailedScheduling": "no node, a while ago",
        "FailedCreate": 'pods "digits-1-worker-0-x1" is forbidden: quota',
    }
    events = [{"reason": reason, "type": "Warning", "message": text, "metadata": {}} for reason, text in said.items()]
    server.handler[f"get /api/v1/namespaces/{NAMESPACE}/events"] << {"items": events}
    detail = kubernetes_target.state(record, tmp_path).detail
    assert "worker-0: no pod: pods is forbidden: quota" in detail
    assert "no node" not in detail


@pytest.mark.parametrize("reason", ["WaitForPodScheduled", "ProvisioningFailed"])
def test_a_volume_that_waits_for_its_pod_is_no_reason_to_wait(
    server: ApiServer, record: JobRecord, tmp_path: Path, reason: str
) -> None:
    server.set_status(CLAIMS, "digits-1", phase="Pending")
    condition = {"type": "PodScheduled", "status": "False", "message": "no node"}
    server.add_pod(
        "digits-1-ps-0", "digits-1-ps-0-abc", "ps", "digits-1", {"phase": "Pending", "conditions": [condition]}
    )
    event = {"reason": reason, "type": "Normal", "message": "of the volume", "metadata": {}}
    server.handler[f"get /api/v1/namespaces/{NAMESPACE}/events"] << {"items": [event]}
    detail = kubernetes_target.state(record, tmp_path).detail
    assert detail.endswith("; ps-0: not scheduled: no node")
    assert ("of the volume" in detail) == (reason == "ProvisioningFailed")


@pytest.mark.parametrize(("minor", "is_new"), [("20", False), ("26+", True), ("", False), ("33", True)])
def test_a_cluster_says_how_old_it_is(server: ApiServer, cluster: Cluster, minor: str, is_new: bool) -> None:
    names = ("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")
    server.handler["get /version/"] << {"major": "1", "minor": minor, **dict.fromkeys(names, "x")}
    assert cluster.is_at_least(26) == is_new


def test_logs_are_read_from_every_pod_and_followed_from_worker_0(
    server: ApiServer, record: JobRecord, tmp_path: Path
) -> None:
    for task in ("ps-0", "worker-0"):
        server.add_pod(f"digits-1-{task}", f"digits-1-{task}-abc", task[:-2], "digits-1", ended(0))
        server.set_log(f"digits-1-{task}-abc", f"{task} line 1\n{task} line 2\n")
    lines = list(kubernetes_target.logs(record, tmp_path, follow=False))
    assert sorted(lines) == [f"{task} | {task} line {n}" for task in ("ps-0", "worker-0") for n in (1, 2)]
    for task in ("worker-0", "worker-1"):
        server.set_status(JOBS, f"digits-1-{task}", conditions=[{"type": "Complete", "status": "True"}])
    assert list(kubernetes_target.logs(record, tmp_path, follow=True)) == ["worker-0 line 1", "worker-0 line 2"]


def test_the_log_has_why_the_container_before_ended(server: ApiServer, record: JobRecord, tmp_path: Path) -> None:
    status = {"name": "task", "restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}}
    pod = {"phase": "Running", "containerStatuses": [status]}
    server.add_pod("digits-1-worker-0", "abc", "worker", "digits-1", pod)
    path = f"get /api/v1/namespaces/{NAMESPACE}/pods/abc/log"
    server.handler[path] << (
        lambda request: b"NameError\n" if request.params["previous"].lower() == "true" else b"again\n"
    )
    lines = list(kubernetes_target.logs(record, tmp_path, follow=False))
    assert lines == ["worker-0 | NameError", "worker-0 | again"]


def test_cancel_deletes_the_jobs_and_remove_the_rest(server: ApiServer, record: JobRecord, tmp_path: Path) -> None:
    kubernetes_target.cancel(record, tmp_path)
    assert {kind for kind, _ in server.names} == {one["kind"] for one in OBJECTS} - {"Job"}
    assert kubernetes_target.state(dataclasses.replace(record, cancelled=True), tmp_path).phase == "cancelled"
    assert kubernetes_target.state(record, tmp_path).phase == "unknown"
    kubernetes_target.remove(record, tmp_path)  # the Jobs are gone already: that does not matter
    assert server.names == set()


def test_a_job_whose_jobs_are_gone_is_followed_to_its_end_and_not_called_cancelled(
    server: ApiServer, cluster: Cluster, record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store = JobStore()
    folder = store.create(record.id)
    store.save(record)
    server.add_pod("digits-1-worker-0", "abc", "worker", "digits-1", ended(0))
    server.set_log("abc", "the last line\n")
    cluster.delete([each for each in OBJECTS if each["kind"] == "Job"])  # by somebody else
    lines: list[str] = []
    gone = JobState("unknown", None, "its Jobs are gone")
    assert submission.follow(record, store, lines.append) == gone and lines == ["the last line"]
    assert submission.cancel(record.id, store) == gone and store.load(record.id) == record
    store.save(dataclasses.replace(record, cancelled=True))  # meanwhile, by another `stratagem jobs cancel`
    assert submission.follow(record, store, lines.append).phase == "cancelled"
    (folder / FILE).write_text(yaml.safe_dump_all(OBJECTS))
    submission.remove(record.id, store)
    assert not store.all()


def test_a_job_whose_cluster_is_gone_for_good_can_be_forgotten(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store = JobStore()
    folder = store.create(record.id)
    store.save(dataclasses.replace(record, place={**record.place, "kubeconfig": str(tmp_path / "nowhere")}))
    with pytest.raises(ConfigurationError, match=f"gone for good, delete {folder}"):
        submission.remove(record.id, store)


@pytest.mark.parametrize("text", ["[]", "5", "clusters: 5", "contexts: [5]\ncurrent-context: a", "{" * 3000])
def test_a_file_of_something_else_is_no_kubeconfig(tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(ConfigurationError, match=f"the kubeconfig {tmp_path}/other cannot be used"):
        Cluster(kubeconfig=str(tmp_path / "other"))


@pytest.mark.parametrize("current", [None, "", "renamed"])
def test_a_job_does_without_a_current_context(
    current: str | None, server: ApiServer, record: JobRecord, tmp_path: Path
) -> None:
    config = yaml.safe_load(server.kubeconfig.read_text())
    del config["current-context"]
    server.kubeconfig.write_text(yaml.safe_dump(config | ({} if current is None else {"current-context": current})))
    assert kubernetes_target.state(record, tmp_path).phase == "pending"
    with pytest.raises(ConfigurationError, match="use-context NAME` chooses among its contexts"):
        Cluster(kubeconfig=str(server.kubeconfig))


def test_no_configuration_and_no_server_are_said_in_words(
    tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no kubeconfig {tmp_path}/nowhere: put it there"):
        Cluster(kubeconfig=str(tmp_path / "nowhere"))
    (tmp_path / "damaged").write_text("{a: [")
    with pytest.raises(ConfigurationError, match=f"the kubeconfig {tmp_path}/damaged cannot be used .*line 1"):
        Cluster(kubeconfig=str(tmp_path / "damaged"))
    with pytest.raises(ConfigurationError, match=r"name other in .*contexts list"):
        Cluster(kubeconfig=str(server.kubeconfig), context="other")
    monkeypatch.chdir(server.kubeconfig.parent)
    monkeypatch.setenv("KUBECONFIG", server.kubeconfig.name)
    with contextlib.closing(Cluster()) as cluster:
        assert cluster.kubeconfig == str(server.kubeconfig), "jobs are asked for from other folders"


@pytest.mark.parametrize(
    ("program", "words"),
    [("/nowhere/login", r".* No such file .* '/nowhere/login'"), ("/bin/false", "exec: process returned 1")],
)
def test_a_login_that_fails_is_said_before_the_cluster_is_asked(
    server: ApiServer, program: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": program}}
    server.kubeconfig.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match=rf"^the login in the kubeconfig fails \({words}\)"):
        Cluster(kubeconfig=str(server.kubeconfig))
    assert capfd.readouterr().err == "", "the library's own line"


def test_a_kubeconfig_without_a_login_is_refused_before_an_image_is_built(server: ApiServer, cluster: Cluster) -> None:
    message = 'namespaces "team" is forbidden: User "system:anonymous" cannot get resource "namespaces"'
    server.handler[f"get /api/v1/namespaces/{NAMESPACE}"] << 403 << {"message": message}
    with pytest.raises(SubmitError, match=r"system:anonymous.*; the login in the kubeconfig is missing"):
        cluster.check_namespace()


def test_a_cluster_that_does_not_answer_is_said_in_the_words_of_the_system(tmp_path: Path, server: ApiServer) -> None:
    config = yaml.safe_load(server.kubeconfig.read_text())
    with socket.socket() as nobody:  # bound, and listens not
        nobody.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{nobody.getsockname()[1]}"
        config["clusters"][0]["cluster"]["server"] = address
        (tmp_path / "stopped").write_text(yaml.safe_dump(config))
        with contextlib.closing(Cluster(kubeconfig=str(tmp_path / "stopped"))) as cluster:
            words = f"^the cluster at {address} could not be asked to list .* Job: Connection refused. "
            with pytest.raises(SubmitError, match=words):
                cluster.jobs("a=b")
