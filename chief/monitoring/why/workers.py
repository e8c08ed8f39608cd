"""Rules about a worker's own work: data, computing, cores, threads."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Mapping, Sequence

from stratagem.chief.monitoring.why.finding import WORTH, Cause, Finding, percent
from stratagem.chief.monitoring.why.reading import Reading, TaskReading
from stratagem.measuring import measures
from stratagem.measuring.measures import labels

SLOWER = 1.6
"""Times the others, from which on a worker is slow."""
MUCH_SLOWER = 2.0
_PARTS = {
    measures.FORWARD: "what comes before backward()",
    measures.BACKWARD: "its backward()",
    measures.OPTIMIZER: "its optimizer",
    measures.SCRIPT: "what comes after its optimizer's step",
    measures.PUSH: "sending its gradients",
}
AWAY_S = 3.0
"""A worker that was seen for so much shorter than another has come, or come back, meanwhile."""
GIL_S = 0.002
"""Mean wait for the interpreter's lock from which on somebody keeps it; its holder is asked to let go after 0.005 s."""


def slow_data(reading: Reading) -> Iterator[Finding]:
    """Workers that wait for their batches."""
    workers = reading.working
    waits = [(_data_share(worker), worker) for worker in workers]
    ordered = sorted(share for share, _ in waits)
    each = [f"{one.task} waits {percent(share)} of its time for data" for share, one in waits]
    if alike := len(waits) > 1 and ordered[0] >= 0.7 * ordered[-1]:
        waits = [min(waits, key=lambda one: one[0])]  # what is said of it holds for all
    for share, worker in waits:
        if share < WORTH:
            continue
        cpu = worker.get(measures.DATA_CPU) / max(1e-9, share * worker.total_s)
        loaders = worker.values.get(measures.LOADER_WORKERS)
        where = "" if loaders is None else f": DataLoader(num_workers={loaders:.0f})"
        advice = "read in other processes: DataLoader(num_workers=2 or more, persistent_workers=True)"
        if loaders:
            advice = "give the DataLoader more workers, cheaper transforms, or faster storage"
        elif cpu < 0.5:
            advice += "; the reading itself waits (a disk, a network), so more of them help"
        per_step = worker.get(measures.DATA_WAIT) / worker.steps
        rest = max(1e-9, worker.own_s - per_step)
        yield Finding(
            Cause.SLOW_DATA,
            "" if alike else worker.task,
            f"{'every worker' if alike else worker.task} spends {percent(share)} of its time waiting for data{where}",
            advice,
            share if reading.in_step or alike else share / len(workers) + share / 4,
            (
                f"a batch takes {1e3 * per_step:.1f} ms, the rest of a step {1e3 * rest:.1f} ms",
                f"the training thread itself computes for {percent(cpu)} of that wait",
                *each,
            ),
        )


def slow_worker(reading: Reading) -> Iterator[Finding]:
    """A worker whose steps take longer than the others', by what it does itself."""
    workers = reading.working
    if len(workers) < 2:
        return
    computing = sorted(_computing_s(one) for one in workers)
    cpus = sorted(one.each_s(measures.STEP_CPU) for one in workers)
    waiting = sorted(one.waits for one in workers)
    phases = {phase: sorted(one.each_s(phase) for one in workers) for phase in _PARTS}
    for worker in workers:
        own, cpu = _computing_s(worker), worker.each_s(measures.STEP_CPU)
        usual, usual_cpu = statistics.median(_without(own, computing)), statistics.median(_without(cpu, cpus))
        ratio = own / max(1e-9, usual)
        # Where all lack cores those that wait for it look slow, too; what they need of them does not grow.
        is_slower = ratio >= SLOWER or cpu >= MUCH_SLOWER * max(1e-9, usual_cpu)
        if not is_slower or own - usual < WORTH * worker.total_s / max(1.0, worker.steps):
            continue
        starved = worker.get(measures.STARVED_MAIN) / worker.steps
        is_starved = (
            cpu < SLOWER * usual_cpu and ratio >= MUCH_SLOWER and own - starved < SLOWER * usual and starved > 0.3 * own
        )
        lost = (own - usual) / own if reading.in_step else (own - usual) / own / len(workers) + 0.1
        waits = percent(statistics.fmean(_without(worker.waits, waiting)))
        after = f": the others wait {waits} of every step" if reading.in_step else ""
        how = (
            f"its CPU time per step is {1e3 * cpu:.1f} ms, that of the others {1e3 * usual_cpu:.1f} ms",
            f"its computing takes {1e3 * own:.1f} ms per step, that of the others {1e3 * usual:.1f} ms",
            *_where(worker, phases),
        )
        cause, sentence = Cause.SLOW_WORKER, f"{worker.task} computes {ratio:.1f} x slower than the others{after}"
        advice = "it has more to do, or a slower machine: compare its CPU, its clock, its share of the batch"
        if is_starved:
            cause, advice = Cause.NO_CORE, "move other load off its machine, or raise its CPU limit"
            sentence = (
                f"{worker.task} gets no core for {percent(starved / own)} of its computing, which takes {ratio:.1f} x "
                f"as long as on the others{after}"
            )
        elif cpu < 0.5 * own:
            advice = (
                "its thread does not run most of that time: look for I/O, locks, sleeps in its script, or "
                "a suspended process (stratagem status --stacks)"
            )
        yield Finding(cause, worker.task, sentence, advice, lost, how)


def _data_share(worker: TaskReading) -> float:
    """Of its time, without that in which its training thread was ready to read, and had no core: it lacks one where it
    needs one, so for each second of CPU as long as in the rest of its steps."""
    cpu = worker.get(measures.DATA_CPU)
    starved = worker.get(measures.STARVED_MAIN) * cpu / max(1e-9, cpu + worker.get(measures.STEP_CPU))
    return max(0.0, worker.get(measures.DATA_WAIT) - starved) / worker.total_s


def interpreter(reading: Reading) -> Iterator[Finding]:
    """Python threads of the script that keep the interpreter's lock from the training thread."""
    for worker in reading.working:
        wait_s = worker.get(measures.GIL_WAIT) / max(1.0, worker.get(measures.GIL_PROBES))
        threads = labels(worker.values, measures.THREAD_CPU)
        cores = sum(threads.values()) / max(1e-9, worker.window_s)
        computing = sum(worker.get(phase) for phase in (measures.DATA_WAIT, *measures.COMPUTING))
        cpu = worker.get(measures.DATA_CPU) + worker.get(measures.STEP_CPU)
        starved = worker.get(measures.STARVED_MAIN) * computing / max(1e-9, worker.total_s)
        # Where the lock is kept as long as it can be, its waiters look as if they had no core, too.
        ran = cpu if wait_s >= 2 * GIL_S else cpu + starved
        share = 1 - min(1.0, ran / max(1e-9, computing))
        if wait_s < GIL_S or cores < 0.1 or share < WORTH:
            continue
        busiest = max(threads, key=lambda name: threads[name])
        yield Finding(
            Cause.INTERPRETER,
            worker.task,
            f"Python threads of {worker.task} keep its training from the interpreter's lock: {busiest} runs "
            f"{percent(threads[busiest] / worker.window_s)} of the time",
            "do that work in processes: DataLoader(num_workers=…), multiprocessing",
            max(share, 0.2),
            (
                f"a thread that wakes up waits {1e3 * wait_s:.1f} ms for the lock",
                f"of {percent(computing / worker.total_s)} of its time in data and computing, the training thread runs "
                f"{percent(cpu / max(1e-9, computing))}",
            ),
        )


def threads(reading: Reading) -> Iterator[Finding]:
    """More threads than cores."""
    hosts: dict[str, list[TaskReading]] = {}
    for worker in reading.working:
        hosts.setdefault(worker.host, []).append(worker)
    for workers in hosts.values():
        cores = max(worker.get(measures.CORES) for worker in workers)
        asked = sum(worker.get(measures.THREADS) for worker in workers)
        without_s, with_s = (sum(one.get(name) for one in workers) for name in (measures.STARVED, measures.CPU))
        starved = without_s / max(1e-9, without_s + with_s)
        if not cores or asked <= max(1.5 * cores, len(workers)) or starved < 0.2:
            continue
        fair = max(1, int(cores // len(workers)))
        yield Finding(
            Cause.THREADS,
            "",
            f"too many threads: {len(workers)} worker{'s' if len(workers) > 1 else ''} on one host compute"
            f"{'s' if len(workers) == 1 else ''} with {asked:.0f} threads on {cores:.0f} cores",
            f"--threads {fair}, or OMP_NUM_THREADS={fair}",
            starved,
            (f"{percent(starved)} of the time that its threads were ready they had no core",),
        )


def gate(reading: Reading) -> Iterator[Finding]:
    """Workers that wait for slower ones at the staleness bound."""
    workers = reading.working
    longest_s = max((worker.window_s for worker in workers), default=0.0)
    back = [worker for worker in workers if worker.window_s < longest_s - AWAY_S]
    waiting = [worker for worker in workers if worker.share(measures.GATE_WAIT) >= WORTH and worker not in back]
    free = [worker for worker in workers if worker not in waiting]
    if not waiting or not free:
        return
    slowest = max(back or free, key=lambda worker: worker.own_s)
    most = max(waiting, key=lambda worker: worker.share(measures.GATE_WAIT))
    share = most.share(measures.GATE_WAIT)
    ratio = slowest.own_s / max(1e-9, statistics.median(worker.own_s for worker in waiting))
    why, advice = f"whose steps take {ratio:.1f} x as long", f"make {slowest.task} as fast as the others"
    if back:
        why, advice = (
            f"which has been there for only {slowest.window_s:.0f} s",
            f"see in its log why {slowest.task} was away",
        )
    yield Finding(
        Cause.GATE,
        slowest.task,
        f"{most.task} spends {percent(share)} of its time waiting at the staleness bound for {slowest.task}, {why}",
        f"a larger --staleness, or {advice}",
        share,
        tuple(f"{one.task} waits {percent(one.share(measures.GATE_WAIT))} there" for one in workers),
    )


def _computing_s(worker: TaskReading) -> float:
    """Seconds a step that a worker computes itself, without what it reads."""
    return sum(worker.get(phase) for phase in (*measures.COMPUTING, measures.PUSH)) / max(1.0, worker.steps)


def _without(own: float, ordered: Sequence[float]) -> Sequence[float]:
    """What the others have, in order: ordered once, as there may be hundreds of them for each of hundreds."""
    place = bisect.bisect_left(ordered, own)
    return [*ordered[:place], *ordered[place + 1 :]]


def _where(worker: TaskReading, phases: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Which part of its step takes longer, where one does most of that; ``phases``: what all spend, in order."""
    more, parts = {}, {}
    for phase, words in _PARTS.items():
        own = worker.each_s(phase)
        usual = statistics.median(_without(own, phases[phase]))
        more[phase] = own - usual
        parts[phase] = f"{words}: {1e3 * own:.1f} ms per step, that of the others {1e3 * usual:.1f} ms"
    most = max(more, key=lambda phase: more[phase])
    if more[most] >= 0.75 * sum(spent for spent in more.values() if spent > 0):
        yield f"what takes longer is {parts[most]}"
