"""The verdict: every rule is asked; the answer is the costliest cause, or one that explains the others."""

from __future__ import annotations

from stratagem.chief.monitoring.why import communication, stalls, workers
from stratagem.chief.monitoring.why.finding import WORTH, Cause, Finding, JobVerdict, percent
from stratagem.chief.monitoring.why.reading import Reading, reading_of
from stratagem.measuring import measures
from stratagem.rpc.status_view import StatusView

RULES = (
    stalls.silent,
    stalls.stuck,
    communication.checkpoints,
    workers.interpreter,
    workers.threads,
    workers.gate,
    workers.slow_worker,
    workers.slow_data,
    communication.exposed,
)
_RANKS = {Cause.SILENT: 6, Cause.STUCK: 5, Cause.CHECKPOINTS: 4, Cause.INTERPRETER: 3, Cause.THREADS: 2}
_RANKS |= {Cause.GATE: 1, Cause.SLOW_LINK: 1}
"""Of causes that explain others, which have a lower one, or none."""
FEW_STEPS, SHORT_S = 5, 3.0
LOOK_S = 5.0
"""Seconds between two looks while a job runs; two must find the same before it is told."""
WORTH_TELLING = 0.3
"""What costs less of the time is left to `stratagem why` then."""


def judge(reading: Reading) -> JobVerdict:
    if reading.problem:
        return JobVerdict(
            Cause.CHIEF_AWAY,
            "chief:0",
            reading.problem,
            "check the chief's log and machine, restart it (with --state-dir it resumes where it was), or read the "
            "summary of a finished run: stratagem why --summary FILE",
            1.0,
            sure="fairly sure",
        )
    found = [finding for rule in RULES for finding in rule(reading) if finding.share >= WORTH]
    found.sort(key=lambda finding: (_RANKS.get(finding.cause, 0), finding.share), reverse=True)
    if not found:
        return _nothing(reading)
    first = found[0]
    whole = vars(first) | {"share": round(min(1.0, first.share), 3), "evidence": (*first.evidence, *_table(reading))}
    also = tuple(finding.sentence for finding in found[1:4])
    if not any(finding.cause in (Cause.NO_CORE, Cause.THREADS) for finding in found):
        also += _without_core(reading)
    return JobVerdict(**whole, sure=_how_sure(reading, first, found), also=also)


class WatchedVerdict:
    """The verdict on a job while it runs: reported when something is wrong, and stays wrong."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._last: JobVerdict | None = None
        self.told: JobVerdict | None = None
        """What is off; None: nothing."""

    def look(self, status: StatusView, now: float) -> bool:
        """Looks if it is time; whether something else is off now than before, or nothing any more."""
        if now < self._looked_at + LOOK_S:
            return False
        self._looked_at, before = now, self.told
        found = judge(reading_of(status))
        is_off = found.cause not in (Cause.NOTHING, Cause.UNKNOWN) and found.share >= WORTH_TELLING
        if not is_off or found.sure.startswith("not"):
            self._last = self.told = None
            return before is not None
        if self._last is not None and (self._last.cause, self._last.task) == (found.cause, found.task):
            self.told = found
        self._last = found
        return self.told is not before and (before is None or (before.cause, before.task) != (found.cause, found.task))


def _nothing(reading: Reading) -> JobVerdict:
    working = reading.working
    if not working and reading.is_over:
        advice = "the run's summary says which task failed first, and why"
        return JobVerdict(Cause.UNKNOWN, "", "no worker finished a step", advice, 0.0)
    if not working:
        waiting = [f"{task.task} waits for {task.waiting_on}" for task in reading.tasks if task.waiting_on]
        missing = [task.task for task in reading.tasks if task.state == "waiting"]
        why = f": waiting for {', '.join(missing)} to join" if missing else ""
        window_s = max((worker.window_s for worker in reading.of("worker")), default=0.0)
        is_long = window_s >= stalls.STUCK_S and not missing  # before that they may have finished some
        return JobVerdict(
            Cause.UNKNOWN,
            "",
            f"no worker has finished a step {f'in the last {window_s:.0f} s' if is_long else 'yet'}{why}",
            "see what the threads are doing: stratagem status --stacks" if is_long else "ask again in a moment",
            0.0,
            tuple(waiting),
        )
    computing = min(worker.share(*measures.COMPUTING) for worker in working)
    return JobVerdict(
        Cause.NOTHING,
        "",
        f"nothing to gain: the workers compute {percent(computing)} of the time",
        "",
        0.0,
        _table(reading),
        _how_sure(reading, None, []),
        _without_core(reading),
    )


def _without_core(reading: Reading) -> tuple[str, ...]:
    """What is outside the job, or more of it than the machine has cores for."""
    starved, task = max(
        ((worker.get(measures.STARVED_MAIN) / worker.total_s, worker.task) for worker in reading.working),
        default=(0.0, ""),
    )
    if starved < 0.2:
        return ()
    return (f"{task}'s training thread is ready but gets no core {percent(starved)} of the time: its machine is busy",)


def _how_sure(reading: Reading, first: Finding | None, found: list[Finding]) -> str:
    if first is not None and first.cause in (Cause.SILENT, Cause.STUCK):
        return "sure" if first.cause is Cause.SILENT else "fairly sure"
    steps = min((worker.steps for worker in reading.working), default=0)
    window_s = min((worker.window_s for worker in reading.working), default=0.0)
    if steps < FEW_STEPS or window_s < SHORT_S:
        return "not sure: few steps have been seen"
    if first is None:
        return "sure"
    stands_out = len(found) < 2 or found[1].share < 0.8 * first.share or first.cause in _RANKS
    if first.share >= 0.4 and stands_out:
        return "sure"
    return "fairly sure"


def _table(reading: Reading) -> tuple[str, ...]:
    """Where the time of each worker goes."""
    lines = []
    for worker in reading.working[:16]:
        parts = [(phase, worker.share(phase)) for phase in measures.PHASES if phase != measures.OUTSIDE]
        words = ", ".join(
            f"{phase.removesuffix('_s').replace('_', ' ')} {percent(share)}" for phase, share in parts if share >= 0.01
        )
        lines.append(f"{worker.task}: {1e3 * worker.total_s / worker.steps:.1f} ms per step: {words}")
    return tuple(lines)
