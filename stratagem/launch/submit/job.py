"""What `run()` returns: a submitted job, to be waited for, read and ended."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

from stratagem.errors import ConfigurationError
from stratagem.launch.submit import submission
from stratagem.launch.submit.record import VARIABLES, JobRecord, JobState, JobStore, remote


@dataclasses.dataclass(frozen=True)
class Job:
    """A submitted job. Its methods do what `stratagem jobs` does. In the job itself, whose script may be the whole
    notebook that calls them, they return at once: there the job runs, and its log is empty."""

    id: str
    """The id that `stratagem jobs` uses; empty in a job that was not started by `run()`, and after a dry run."""
    target: str
    """local, compose or kubernetes."""
    docker_image: str = ""
    """Image of the tasks, by digest once it has been pushed; empty for a local job."""
    folder: str = ""
    """Folder whose contents outlive the job: inside the job the shared volume of all tasks, or locally the job's
    folder; for the submitting process, the folder of its record."""

    def state(self) -> JobState:
        """Where the job stands. Raises ConfigurationError: it was a dry run, or removed; SubmitError: its target does
        not answer. So does each method."""
        return self._asked(submission.state_of)

    def wait(self, stream_logs: bool = False) -> JobState:
        """Returns when the job is over, how it ended. ``stream_logs``: show its log until then."""
        show = functools.partial(print, flush=True) if stream_logs else lambda line: None
        return self._asked(lambda record, store: submission.follow(record, store, show))

    def logs(self) -> str:
        """What the job has written so far."""
        if remote():
            return ""
        store = JobStore()
        return "".join(f"{line}\n" for line in submission.logs_of(self._record(store), store, follow=False))

    def cancel(self) -> JobState:
        """Tells the job to save and end; its log and its checkpoints stay."""
        return self._asked(lambda record, store: submission.cancel(record.id, store))

    def remove(self) -> None:
        """Forgets the job, which is over, with its log, containers, volume and local image."""
        if not remote():
            store = JobStore()
            submission.remove(self._record(store).id, store)

    def _asked(self, ask: Callable[[JobRecord, JobStore], JobState]) -> JobState:
        if remote():
            return JobState("running")
        store = JobStore()
        return ask(self._record(store), store)

    def _record(self, store: JobStore) -> JobRecord:
        if not self.id:
            raise ConfigurationError("this was a dry run, which submits no job: call run() without dry_run")
        return store.load(self.id)


def own_job() -> Job:
    """The job that this process is a task of."""
    return Job(*(os.environ.get(name, "") for name in VARIABLES))
