"""Pods without Kubernetes: the Jobs of a manifest as processes, each in a network namespace with an address of its own.

What the kubelet does that matters here is done for real: the environment of ConfigMap and template, names by /etc/hosts
for the Service, probes inside the pod, a new process after a failure, SIGTERM when the pod has to leave. An image is
not needed: the command comes from this environment, the job's volume is a folder, and so are Secrets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, shaped_hosts
from stratagem.launch.manifests.pod import JOB_FOLDER, TLS_FOLDER, Object
from tests import forks

REPOSITORY = Path(__file__).parents[2]
RATE_MBIT = 1000
POLL_S = 0.05


class Pod:
    """The one pod of a Job.

    Args:
        job: the Job.
        variables: environment of the ConfigMap that its container names.
        host: where it runs.
        folder: the job's volume; also gets the logs, and <hostname>/tls with what the pod sees of its Secret.
    """

    def __init__(self, job: Object, variables: dict[str, str], host: Host, folder: Path) -> None:
        spec = job["spec"]["template"]["spec"]
        self.name = f"{spec['hostname']}.{spec['subdomain']}"
        self.container: dict[str, Any] = spec["containers"][0]
        self.restarts = spec["restartPolicy"] == "OnFailure"
        self.host = host
        self.log = folder / f"{spec['hostname']}.log"
        self.exit_codes: list[int] = []
        self.process: subprocess.Popen[str] | None = None
        own = {each["name"]: each["value"] for each in self.container["env"] if "value" in each}
        inherited = {name: value for name, value in os.environ.items() if name.startswith(forks.READ_AT_START)}
        inherited |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
        self._places = {JOB_FOLDER: str(folder), TLS_FOLDER: str(folder / spec["hostname"] / "tls")}
        for secret in (each["secret"] for each in spec["volumes"] if each["name"] == "tls"):
            own_files = folder / spec["hostname"] / "tls"
            own_files.mkdir(parents=True)
            for item in secret["items"]:
                shutil.copy(folder / secret["secretName"] / item["key"], own_files / item["path"])
        self._environment = {**inherited, **{name: self._here(value) for name, value in (variables | own).items()}}

    def start(self) -> None:
        """Starts the container, for the first time or again."""
        with self.log.open("ab") as log:
            command = self.host.command(*map(self._here, self.container["command"]))
            self.process = forks.Popen(
                command, env=self._environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
            )

    def reap(self) -> None:
        """Looks whether the container has ended; one that failed is started again, as the pod's template says."""
        if self.process is None or (code := self.process.poll()) is None:
            return
        self.exit_codes.append(code)
        self.process = None
        if code != 0 and self.restarts:
            self.start()

    def signal(self, number: signal.Signals) -> None:
        """To the container."""
        assert self.process is not None, f"{self.name} has ended: {self.exit_codes}"
        self.process.send_signal(number)

    def probe(self, name: str) -> bool:
        """What "livenessProbe" or "readinessProbe" would find now."""
        return self.execute(*self.container[name]["exec"]["command"]).returncode == 0

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Another process inside the pod, as of `kubectl exec`."""
        return forks.run(self.host.command(*command), env=self._environment, timeout=60)

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def _here(self, text: str) -> str:
        for place, here in self._places.items():
            text = text.replace(place, here)
        return text


class Pods:
    """The pods of a job, by host name: ``pods["worker-1"]``."""

    def __init__(self, pods: Sequence[Pod]) -> None:
        self._pods = {pod.name.partition(".")[0]: pod for pod in pods}

    def __getitem__(self, name: str) -> Pod:
        return self._pods[name]

    def until(self, holds: Callable[[], bool], what: str, deadline_s: float = 200.0) -> None:
        """Keeps the pods running until ``holds``; fails, with all logs, after ``deadline_s`` seconds."""
        deadline = time.monotonic() + deadline_s
        while not holds():
            for pod in self._pods.values():
                pod.reap()
            assert time.monotonic() < deadline, f"not within {deadline_s:.0f} s: {what}\n{self.logs()}"
            time.sleep(POLL_S)

    def until_done(self) -> None:
        """Until every Job that was started is complete."""
        self.until(lambda: all(pod.process is None for pod in self._pods.values()), "every Job is complete")

    def logs(self) -> str:
        """What all have written."""
        return "\n".join(f"== {name} {pod.exit_codes}\n{pod.text()[-4000:]}" for name, pod in self._pods.items())

    def start(self, *names: str) -> None:
        """Starts these pods."""
        for name in names or self._pods:
            self._pods[name].start()

    def end(self) -> None:
        """Kills what still runs."""
        for pod in self._pods.values():
            if pod.process is not None:
                pod.process.kill()
                pod.process.wait()


@contextlib.contextmanager
def pods_of(objects: Sequence[Object], folder: Path, later: Sequence[Object] = ()) -> Iterator[Pods]:
    """The pods of the Jobs among ``objects``, not started; all that was made is removed at the end.

    Args:
        objects: what was applied at first.
        folder: the job's volume; a Secret is a folder in it.
        later: what is applied afterwards: Jobs that are new get the environment that is written there.
    """
    environments: dict[str, tuple[Object, Object]] = {}
    for applied in (later, objects):
        (config,) = (each["data"] for each in applied if each["kind"] == "ConfigMap") if applied else ({},)
        environments |= {each["metadata"]["name"]: (each, config) for each in applied if each["kind"] == "Job"}
    jobs = list(environments.values())
    with shaped_hosts(len(jobs), RATE_MBIT) as hosts, contextlib.ExitStack() as undo:
        pods = [Pod(job, config, host, folder) for (job, config), host in zip(jobs, hosts, strict=True)]
        names = "".join(f"{pod.host.address} {pod.name}\n" for pod in pods)
        for host in hosts:  # `ip netns exec` puts the files of this folder over those of /etc
            own = Path("/etc/netns") / host.namespace
            own.mkdir(parents=True)
            undo.callback(shutil.rmtree, own)
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        running = Pods(pods)
        undo.callback(running.end)
        yield running
