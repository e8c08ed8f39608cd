"""What every target can do: one small interface, three implementations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from stratagem.launch.submit.plan import JobPlan
from stratagem.launch.submit.record import JobRecord
from stratagem.launch.submit.state import JobState


class Target(Protocol):
    """Where jobs run."""

    def show(self, plan: JobPlan) -> str:
        """What would be submitted, for people."""

    def submit(self, plan: JobPlan, folder: Path) -> tuple[str, dict[str, str]]:
        """Makes the image and starts the job; returns the image, and what is needed to find the job again.

        Raises:
            SubmitError: the target refused; nothing is left running.
        """

    def state(self, record: JobRecord, folder: Path) -> JobState:
        """Where the job stands."""

    def logs(self, record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
        """Lines of what the job has written, without line ends; to its end if ``follow``."""

    def cancel(self, record: JobRecord, folder: Path) -> None:
        """Tells the job to save and end."""

    def remove(self, record: JobRecord, folder: Path) -> None:
        """Deletes what the target still has of a job that is over."""


def target_of(name: str) -> Target:
    """The target of a name; loaded when it is needed."""
    if name == "local":
        from stratagem.launch.submit.local_target import LocalTarget

        return LocalTarget()
    if name == "compose":
        from stratagem.launch.submit.compose_target import ComposeTarget

        return ComposeTarget()
    from stratagem.launch.submit.kubernetes_target import KubernetesTarget

    return KubernetesTarget()
