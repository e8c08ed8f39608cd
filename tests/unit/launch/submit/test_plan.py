"""Plans and records: ids, the Dockerfile, what is kept; and when a process is part of a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.launch.submit import api
from stratagem.launch.submit.entry_point import EntryPoint, find_entry_point
from stratagem.launch.submit.job import Job
from stratagem.launch.submit.plan import make_plan, new_job_id
from stratagem.launch.submit.record import VARIABLES, JobRecord, JobStore
from stratagem.launch.submit.request import JobRequest


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TF_CONFIG", "RANK", "STRATAGEM_JOB_ID", "STRATAGEM_REPORT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")


@pytest.mark.parametrize("stem", ["train", "My_Script (2)", "1st", "-", "x" * 80, "é"])
def test_an_id_is_a_name_that_every_target_takes(stem: str) -> None:
    ids = {new_job_id(stem) for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", one) and len(one) <= 40 and "--" not in one for one in ids)


def test_the_dockerfile_has_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps" / "needs.txt").write_text("einops\n")
    request = JobRequest(
        target="kubernetes",
        docker_image_bucket_name="registry.example:5000/team",
        docker_base_image="base:2",
        requirements_txt="deps/needs.txt",
        job_labels={"team": "vision"},
    )
    plan = make_plan(request, find_entry_point("train.py"), tmp_path)
    assert plan.image is not None and plan.image.pushed
    assert plan.image.name == f"registry.example:5000/team/{plan.id}:latest"
    lines = plan.image.made["Dockerfile"].splitlines()
    assert "FROM base:2" in lines and 'LABEL "team"="vision"' in lines and "USER 10001:10001" in lines
    assert lines.index("USER root") < lines.index("USER 10001:10001")
    assert any("pip install" in line and "requirements.txt" in line for line in lines)
    assert plan.image.made["requirements.txt"] == "einops\n"
    assert plan.image.context.files == ("deps/needs.txt", "train.py")
    workload = plan.workload(f"i@sha256:{'1' * 64}")
    assert (workload.script, workload.environment["STRATAGEM_JOB_IMAGE"]) == ("train.py", f"i@sha256:{'1' * 64}")
    base = make_plan(JobRequest(target="compose"), find_entry_point("train.py"), tmp_path).image
    assert base is not None and "FROM stratagem:latest\n" in base.made["Dockerfile"] and not base.pushed


@pytest.mark.parametrize(("num_ps", "seconds"), [(1, 30.0), (0, 0.0)])
def test_parameter_servers_in_containers_are_saved_on_the_way(num_ps: int, seconds: float, tmp_path: Path) -> None:
    request = JobRequest(target="compose", worker_count=2, ps_count=num_ps)
    assert make_plan(request, find_entry_point("train.py"), tmp_path).workload().checkpoint_every_s == seconds


def test_what_kubernetes_would_not_take_is_said_before_an_image_is_built(tmp_path: Path) -> None:
    request = JobRequest(target="kubernetes", docker_image_bucket_name="r.example", kubernetes_storage_class="A b")
    with pytest.raises(ConfigurationError, match=r"storage class as Kubernetes takes it .* got 'A b'"):
        make_plan(request, find_entry_point("train.py"), tmp_path)


def test_requirements_may_be_a_list() -> None:
    assert JobRequest(requirements_txt=["einops", "rich>=13"]).requirements == "einops\nrich>=13\n"
    assert JobRequest().requirements is None


def test_a_script_made_from_a_notebook_goes_where_it_would_stand(tmp_path: Path) -> None:
    plan = make_plan(JobRequest(target="compose"), EntryPoint(tmp_path / "a" / "n.ipynb.py", "print(2)\n"), tmp_path)
    assert plan.image is not None and plan.image.made["project/a/n.ipynb.py"] == "print(2)\n"


def test_the_caller_is_not_part_of_a_job_and_a_task_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sg.remote()
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    assert sg.remote()
    # Inside, nothing is checked any more: the arguments were right where the job was submitted.
    assert sg.run("nowhere.py", worker_count=-1) == Job("", "")
    for name, value in zip(VARIABLES, ("id-1", "compose", "image", "/job"), strict=True):
        monkeypatch.setenv(name, value)
    assert sg.run(worker_count=2) == Job("id-1", "compose", "image", "/job")


@pytest.mark.parametrize("given", [{"stream_logs": "no"}, {"worker_cont": 2}])
def test_an_argument_of_another_kind_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(given))}"):
        sg.run("train.py", dry_run=True, **given)


def test_after_submitting_itself_a_script_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import __main__

    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "train.py"), raising=False)
    with pytest.raises(SystemExit) as ended:
        sg.run(dry_run=True)
    assert ended.value.code == 0
    assert "stratagem run --workers=1" in capsys.readouterr().out
    assert api.run("train.py", dry_run=True) == Job("", "local")  # with an entry point the caller goes on


def test_a_job_that_is_removed_meanwhile_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "not a record of a job"."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store = JobStore()
    for job_id in ("train-1", "train-2"):
        store.create(job_id)
        store.save(JobRecord(job_id, "local", "train.py", "one", 1, 0, "2026-01-02T00:00:00+00:00"))
    read = Path.read_bytes

    def removed_first(file: Path) -> bytes:
        if file.parent.name == "train-1":
            store.remove("train-1")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", removed_first)
    assert [record.id for record in store.all()] == ["train-2"]


def test_jobs_that_cannot_be_kept_are_told_where_they_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "train.py"))
    with pytest.raises(ConfigurationError, match=r"train\.py/stratagem/jobs: Not a directory; set XDG_STATE_HOME"):
        JobStore().create("train-1")
    (tmp_path / "stratagem").mkdir()
    (tmp_path / "stratagem" / "jobs").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"stratagem/jobs: File exists; set XDG_STATE_HOME"):
        JobStore().create("train-1")


def test_a_relative_state_home_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job submitted in one folder was unknown in the next."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert JobStore().root == tmp_path / ".local" / "state" / "stratagem" / "jobs"


@pytest.mark.parametrize("home", ["home", "~"])  # "~": what is found of a user whom the system has no entry of
def test_a_user_without_a_home_is_told_where_jobs_could_be_kept(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(ConfigurationError, match="this user has none: set HOME or XDG_STATE_HOME"):
        JobStore()


def test_jobs_that_cannot_be_read_are_not_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert JobStore().all() == []
    (tmp_path / "stratagem").touch()
    words = r"cannot be read in .*/stratagem/jobs: Not a directory; set XDG_STATE_HOME"
    with pytest.raises(ConfigurationError, match=words):
        JobStore().all()
    with pytest.raises(ConfigurationError, match=words):
        JobStore().load("train-1")


def test_records_are_kept_and_a_damaged_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = JobStore()
    assert store.root == tmp_path / "state" / "stratagem" / "jobs" and store.all() == []
    record = JobRecord(
        id="train-1",
        target="local",
        entry_point="train.py",
        strategy="one",
        num_workers=1,
        num_ps=0,
        created_at="2026-01-02T00:00:00+00:00",
        args=("--a", "b"),
        labels={"team": "x"},
        place={"host": "h"},
    )
    assert store.create("train-1").stat().st_mode & 0o077 == 0
    store.save(record)
    assert store.load("train-1") == record and store.all() == [record]
    with pytest.raises(ConfigurationError, match="did you mean 'train-1'"):
        store.load("train-2")
    with pytest.raises(ConfigurationError, match="unknown job"):
        store.load("../jobs/train-1")
    with pytest.raises(FileExistsError):
        store.create("train-1")
    file = store.folder("train-1") / "job.json"
    for text in ("", "[]", "{}", "null", file.read_text().replace('"num_workers": 1', '"num_workers": "many"')):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="not a record of a job"):
            store.load("train-1")
    file.unlink()
    file.mkdir()
    for look in (store.all, lambda: store.load("train-1")):
        with pytest.raises(ConfigurationError, match=f"{file} cannot be read: Is a directory"):
            look()
