"""Rules about what workers wait for: parameter servers, links, lanes, checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from stratagem.chief.monitoring.why.finding import WORTH, Cause, Finding, percent, rate
from stratagem.chief.monitoring.why.reading import Reading, TaskReading
from stratagem.measuring import measures

FEW_ROWS = 0.3
"""The part of a table's row updates from which on the few rows that get it are why its shard is hot."""
STANDS_STILL_S = 0.01
"""Mean time that a thread of a ps wakes late and was not ready, from which on its process is stopped now and then."""
FRAME_BYTES = 32 << 10
"""Frames below this cost more than what they carry."""


def checkpoints(reading: Reading) -> Iterator[Finding]:
    """Commits that are held while checkpoints are written, and workers that write them."""
    for chief in reading.of("chief"):
        share = chief.get(measures.CHECKPOINT) / chief.window_s if chief.window_s else 0.0
        count = chief.get(measures.CHECKPOINTS)
        if share >= WORTH and count:
            yield _storm("", share, count, chief.window_s, chief.get(measures.CHECKPOINT) / count)
    for worker in reading.working:
        if (share := worker.share(measures.SAVE)) >= WORTH:
            yield _storm(worker.task, share, 0, worker.window_s, 0)


def exposed(reading: Reading) -> Iterator[Finding]:
    """Why workers wait for ps, or for each other's gradients."""
    workers = reading.working
    if not workers:
        return
    pick = min if reading.in_step else max  # in step the slowest waits least: what it waits all do
    worker = pick(workers, key=lambda one: one.waits - one.share(measures.GATE_WAIT, measures.MEETING))
    share = worker.waits - worker.share(measures.GATE_WAIT, measures.MEETING)
    if share < WORTH:
        return
    rules = (_small_frames, _slow_link, _lane, _hot_shard, _slow_ps)
    found = next((finding for rule in rules for finding in rule(reading, worker, share)), None)
    if found is not None:
        yield found
    elif share >= 2 * WORTH:
        step_ms = 1e3 * worker.total_s / worker.steps
        is_between_hosts = not reading.of("ps") and len({one.host for one in workers}) > 1
        yield Finding(
            Cause.COMMUNICATION,
            "",
            f"{worker.task} spends {percent(share)} of its time waiting for communication: steps of {step_ms:.1f} ms "
            "are short",
            "larger batches, or several backward() per step" + (", --wire-dtype bfloat16" if is_between_hosts else ""),
            share,
            (f"{1e3 * worker.own_s:.1f} ms of a step are its own computing",),
        )


def _storm(task: str, share: float, count: float, window_s: float, each_s: float) -> Finding:
    less = (
        "save less often in the script, or with blocking=False"
        if task
        else "take them less often (--checkpoint-every-s)"
    )
    how = f"{count:.0f} in {window_s:.0f} s, {each_s:.2f} s each" if count else f"in {window_s:.0f} s"
    return Finding(
        Cause.CHECKPOINTS,
        task,
        f"checkpoints take {percent(share)} of the time" + (f" of {task}" if task else ": commits are held meanwhile"),
        f"{less}, or on a faster disk",
        share,
        (how,),
    )


def _slow_link(reading: Reading, worker: TaskReading, share: float) -> Iterator[Finding]:
    links = {}
    places = {task.task: task.host for task in reading.tasks}
    for task in reading.tasks:
        sent = task.lanes(measures.SENT)
        for lane, busy_s in task.lanes(measures.LINK_BUSY).items():
            # What tasks of one host send goes over no link: the bytes wait for a core, or the lane is a poor one.
            if task.window_s > 0 and busy_s > 0 and places.get(lane[0]) != task.host:
                links[task.task, lane[0]] = busy_s / task.window_s, sent.get(lane, 0.0) / busy_s, sent.get(lane, 0.0)
    if not links:
        return
    (one, other), (busy, speed, num_bytes) = max(links.items(), key=lambda item: item[1][0])
    if busy < max(0.3, 0.5 * share) or num_bytes < 1e5:
        return
    rest = [fast for key, (_, fast, sent) in links.items() if key != (one, other) and sent > 0.2 * num_bytes]
    compare = f", the others {rate(statistics.median(rest))}" if rest else ""
    trips = [task.lanes(measures.ROUND_TRIP).get((other, "tcp")) for task in reading.tasks if task.task == one]
    yield Finding(
        Cause.SLOW_LINK,
        one,
        f"the link {one}–{other} carries {rate(speed)}{compare}: it is full {percent(busy)} of the time",
        f"a faster network, {'' if reading.of('ps') else '--wire-dtype bfloat16, --compression, '}or larger batches",
        share,
        (
            *(f"its round trip is {1e3 * trip:.2f} ms" for trip in trips if trip),
            f"{worker.task} spends {percent(share)} of its time waiting for communication",
        ),
    )


def _small_frames(reading: Reading, worker: TaskReading, share: float) -> Iterator[Finding]:
    sent = worker.lanes(measures.SENT)
    for lane, frames in worker.lanes(measures.SENT_FRAMES).items():
        size, per_step = sent.get(lane, 0.0) / max(1.0, frames), frames / worker.steps
        if size < FRAME_BYTES and per_step >= 32:
            yield Finding(
                Cause.SMALL_FRAMES,
                "",
                f"frames of {size / 1024:.1f} KiB are too small: {worker.task} sends {lane[0]} "
                f"{per_step:.0f} of them every step",
                "raise STRATAGEM_FRAME_BYTES" if reading.of("ps") else "raise --chunk-bytes",
                share,
                (f"{worker.task} spends {percent(share)} of its time waiting for communication",),
            )


def _lane(reading: Reading, worker: TaskReading, share: float) -> Iterator[Finding]:
    for one in [worker, *reading.working]:
        for key, why in one.notes.items():
            name, _, peer = key.partition("|")
            if name == "fallback":
                taken = one.notes.get(f"lane|{peer}", "")
                yield Finding(
                    Cause.LANE,
                    one.task,
                    f"{one.task} talks to {peer} over a slower lane than it could: {taken.partition(',')[0]} ({why})",
                    "leave --transport auto; give containers shared memory (--shm-size, an emptyDir of medium Memory)",
                    share,
                    (f"{worker.task} spends {percent(share)} of its time waiting for communication", f"lane: {taken}"),
                )


def _hot_shard(reading: Reading, worker: TaskReading, share: float) -> Iterator[Finding]:
    servers = reading.of("ps")
    if len(servers) < 2:
        return
    took = {server.task: reading.received_bytes(server) for server in servers}
    hot = max(took, key=lambda task: took[task])
    part = took[hot] / max(1.0, sum(took.values()))
    others = [task for task in took if task != hot]
    is_like_the_others = part < 1.5 / len(servers) or (part < 0.6 and len(servers) == 2)
    if is_like_the_others or _waits_for(reading, hot) < max(_waits_for(reading, one) for one in others):
        return
    values = next(server for server in servers if server.task == hot).values
    if took[hot] < FRAME_BYTES * values.get(measures.COMMITS, 0.0):
        return  # so few bytes an update cost as much wherever they go
    by_group = measures.labels(values, measures.GROUP_APPLY)
    hottest = max(by_group, key=lambda group: by_group[group], default="")
    why, advice = "its shard is hot", "cut variables over all ps: a partitioner (sg.FixedShardsPartitioner)"
    table, rows = _hot_rows(values)
    shown = ", ".join(f"{row} {percent(of_row)}" for row, of_row in rows.items())
    if sum(rows.values()) >= FEW_ROWS:
        most = max(rows, key=lambda row: rows[row])
        which = f"row {most}" if len(rows) == 1 else f"{len(rows)} rows"
        why = f"{which} of {table} get{'s' * (len(rows) == 1)} {percent(sum(rows.values()))} of its row updates"
        advice = (
            "number the ids of that table so that frequent ones lie apart (a permutation, a hash), as rows are placed "
            "by ranges; or keep the most frequent ones in a small module of their own"
        )
    yield Finding(
        Cause.HOT_SHARD,
        hot,
        f"{hot} gets {percent(part)} of the bytes of {len(servers)} ps: {why}",
        advice,
        share,
        (
            *(f"{task}: {rate(num_bytes / max(1e-9, worker.window_s))}" for task, num_bytes in took.items()),
            *([f"most of its time goes to group {hottest}"] if hottest else []),
            *([f"rows of {table}: {shown}"] if rows else []),
        ),
    )


def _hot_rows(values: measures.Values) -> tuple[str, dict[str, float]]:
    """The table of a ps whose told rows get the largest part of its updates, and the part of each."""
    tables: dict[str, dict[str, float]] = {}
    for name, share in sorted(measures.labels(values, measures.ROW_SHARE).items(), key=lambda one: -one[1]):
        table, _, row = name.rpartition(":")
        tables.setdefault(table, {})[row] = share
    return max(tables.items(), key=lambda one: sum(one[1].values()), default=("", {}))


def _slow_ps(reading: Reading, worker: TaskReading, share: float) -> Iterator[Finding]:
    """The ps that is waited for most: it is busy, slower than the others, answers late, or starves."""
    servers = [server for server in reading.of("ps") if server.get(measures.COMMITS) and server.window_s > 0]
    if not servers:
        return
    waits = {server.task: _waits_for(reading, server.task) for server in servers}
    slow = max(servers, key=lambda server: (waits[server.task], server.busy))
    each = {server.task: server.served_s / server.get(measures.COMMITS) for server in servers}
    others = [seconds for task, seconds in each.items() if task != slow.task]
    ratio = each[slow.task] / max(1e-9, statistics.median(others)) if others else 0.0
    cores = slow.get(measures.CPU) / slow.window_s
    # In step its reply waits for the other workers: what is late is not the ps then.
    is_late = waits[slow.task] >= 4 * slow.served_s and not reading.in_step
    works_little = slow.busy < 0.4 and ratio < 2
    if works_little and not is_late:
        return
    late_s = slow.get(measures.GIL_WAIT) / max(1.0, slow.get(measures.GIL_PROBES))
    advice = "add a ps, or give it more --threads"
    if late_s >= STANDS_STILL_S:
        wakes = f"{1e3 * late_s:.0f} ms at each wake-up"
        advice = f"it stalls now and then, {wakes}: is it being suspended, or is it swapping?"
    elif cores < 0.5 * slow.busy:
        advice = "its process waits most of that time, for a core (other load on its machine) or as it is suspended"
    elif is_late:
        advice = (
            "it answers late but works little: it is suspended now and then, or its machine is busy with other things"
        )
    if late_s < STANDS_STILL_S and _is_starved(reading, slow, servers):
        no_core = percent(slow.get(measures.STARVED) / slow.window_s)
        yield Finding(
            Cause.NO_CORE,
            slow.task,
            f"{slow.task} is ready but gets no core {no_core} of the time, and "
            f"{worker.task} spends {percent(share)} of its time waiting for communication",
            "move other load off its machine, raise its CPU limit, or use fewer processes or threads",
            share,
            (f"it is busy {percent(slow.busy)} of the time, on {cores:.1f} cores",),
        )
        return
    sentence = (
        f"{slow.task} is slow: it is busy {percent(slow.busy)} of the time, {1e3 * each[slow.task]:.1f} ms per update"
    )
    if works_little:
        # What else is waited for, the other ps for example, is not by it.
        share = min(share, waits[slow.task] / max(1e-9, sum(one.total_s for one in reading.working)))
        if share < WORTH:
            return
        sentence = (
            f"{slow.task} answers late: workers spend {percent(share)} of their time waiting for it, but it is busy "
            f"only {percent(slow.busy)}"
        )
    compared = f", {ratio:.1f} x as long as the others" if ratio >= 1.5 else ""
    steps = max(1.0, sum(one.steps for one in reading.working))
    moved = sum(slow.lanes(measures.RECEIVED).values()) + sum(slow.lanes(measures.SENT).values())
    parts = (measures.RECEIVE, measures.MERGE, measures.APPLY, measures.REPLY, measures.STARVED)
    words = {measures.STARVED: "without a core"}
    yield Finding(
        Cause.SLOW_PS,
        slow.task,
        sentence + compared,
        advice,
        share,
        (
            f"workers wait {1e3 * waits[slow.task] / steps:.1f} ms per step for {slow.task}",
            f"{rate(moved / slow.window_s)} on {cores:.1f} cores: "
            + ", ".join(
                f"{words.get(part, part.removesuffix('_s'))} {percent(slow.get(part) / slow.window_s)}"
                for part in parts
            ),
        ),
    )


def _is_starved(reading: Reading, slow: TaskReading, servers: Sequence[TaskReading]) -> bool:
    """Whether a ps lacks cores, more than the others, and its updates are not just as much work as steps of workers."""
    waited_s = max(one.get(f"{measures.PEER_WAIT}|{slow.task}") for one in reading.working)
    others = (1.5 * server.get(measures.STARVED) for server in servers if server is not slow)
    if slow.get(measures.STARVED) < max(0.2 * slow.window_s, 0.6 * waited_s, *others):
        return False
    cpu = statistics.mean(one.get(measures.CPU) / one.steps for one in reading.working)
    does = slow.get(measures.CPU) / slow.get(measures.COMMITS) * len(reading.working)
    # Its own work takes long: it does much of what a worker does, and the machine is as short of cores for all of them.
    usual = statistics.mean(map(_seconds_without_a_core, reading.working))
    return does < 0.6 * cpu or _seconds_without_a_core(slow) >= 4 * usual


def _seconds_without_a_core(task: TaskReading) -> float:
    """How long its threads were ready and had no core, for each second that they had one."""
    return task.get(measures.STARVED) / max(1e-9, task.get(measures.CPU))


def _waits_for(reading: Reading, server: str) -> float:
    """Seconds that all workers waited for it."""
    return sum(one.get(f"{measures.PEER_WAIT}|{server}") for one in reading.working)
