"""The verdict as a function: tables of numbers in, a cause out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.chief.monitoring.why.finding import Cause
from stratagem.chief.monitoring.why.reading import Reading, TaskReading, reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.cluster.job_rules import OF_RING
from stratagem.rpc.status_view import StatusView, TaskState

WINDOW_S = 10.0
COMPUTING = {"forward_s": 0.3, "backward_s": 0.6, "optimizer_s": 0.08, "script_s": 0.02}


def worker(index: int, steps: float = 100, **seconds: float) -> TaskReading:
    """A worker whose phases are given; computing takes what is left of the window, and its CPU is what it computes."""
    compute = WINDOW_S - sum(spent for name, spent in seconds.items() if name != "cpu_s")
    values = {
        "steps": steps,
        **{name: part * compute for name, part in COMPUTING.items()},
        "step_cpu_s": compute,
        "data_wait_cpu_s": seconds.get("data_wait_s", 0.0),
        "threads": 1,
        "cores": 8,
        "cpu_s": compute,
        "starved_s": 0.01,
        "starved_main_s": 0.01,
        "gil_wait_s": 0.001,
        "gil_probes": 15,
        "loader_workers": 0,
        **seconds,
    }
    return TaskReading(f"worker:{index}", values, WINDOW_S, notes={"host": "one"})


def ps(index: int, commits: float = 200, **values: float) -> TaskReading:
    return TaskReading(f"ps:{index}", {"commits": commits, "cpu_s": 0.5, "apply_s": 0.2, **values}, WINDOW_S)


def with_values(task: TaskReading, **values: float) -> TaskReading:
    """``bar`` stands for the bar of a label."""
    return dataclasses.replace(
        task, values={**task.values, **{key.replace("BAR", "|"): v for key, v in values.items()}}
    )


def in_step(*tasks: TaskReading) -> list[TaskReading]:
    return [with_values(task, in_step=1.0) if task.task.startswith("worker") else task for task in tasks]


def lanes(task: TaskReading, **of: Mapping[str, float]) -> TaskReading:
    """``lanes(task, sent_bytes={"ps:0/tcp": 1e9})``."""
    values = {f"{name}|{lane}": value for name, each in of.items() for lane, value in each.items()}
    return dataclasses.replace(task, values={**task.values, **values})


def noted(task: TaskReading, notes: Mapping[str, str]) -> TaskReading:
    return dataclasses.replace(task, notes={**task.notes, **notes})


CHIEF = TaskReading("chief:0", {}, WINDOW_S)
TABLE: Mapping[str, tuple[list[TaskReading], Cause, str, str]] = {
    "all compute": ([worker(0), worker(1), ps(0)], Cause.NOTHING, "", "nothing to gain: the workers compute 100 %"),
    "a little of everything": (
        [worker(0, data_wait_s=0.5, wait_s=0.8), worker(1, data_wait_s=0.4, wait_s=1.0), ps(0)],
        Cause.NOTHING,
        "",
        "nothing to gain",
    ),
    "one slow in step": (
        in_step(worker(0, wait_s=7.4), worker(1)),
        Cause.SLOW_WORKER,
        "worker:1",
        "worker:1 computes 3.8 x slower than the others: the others wait 74 % of every step",
    ),
    "one slow, each at its own pace": (
        [worker(0, steps=400), worker(1, steps=400), worker(2, steps=100), ps(0)],
        Cause.SLOW_WORKER,
        "worker:2",
        "worker:2 computes 4.0 x slower",
    ),
    "one slow where nobody gets the core he needs": (
        in_step(
            with_values(worker(0, wait_s=3.7), step_cpu_s=2.2, starved_main_s=2.9),
            with_values(worker(1, wait_s=0.4), step_cpu_s=8.4, starved_main_s=1.1),
        ),
        Cause.SLOW_WORKER,
        "worker:1",
        "worker:1 computes 1.5 x slower than the others: the others wait 37 % of every step",
    ),
    "one without a core": (
        in_step(worker(0, wait_s=7.0), with_values(worker(1), step_cpu_s=3.0, starved_main_s=7.0)),
        Cause.NO_CORE,
        "worker:1",
        "gets no core for 70 %",
    ),
    "all starve alike": (
        [with_values(worker(index), step_cpu_s=4.0, starved_main_s=6.0, starved_s=7.0, cpu_s=4.0) for index in (0, 1)],
        Cause.NOTHING,
        "",
        "nothing to gain",
    ),
    "all read without a core": (
        [with_values(worker(index, data_wait_s=1.5), starved_main_s=6.0, step_cpu_s=4.0) for index in (0, 1)],
        Cause.NOTHING,
        "",
        "nothing to gain",
    ),
    "data everywhere": (
        [worker(0, data_wait_s=6.4), worker(1, data_wait_s=6.0), ps(0)],
        Cause.SLOW_DATA,
        "",
        "every worker spends 60 % of its time waiting for data: DataLoader(num_workers=0)",
    ),
    "data of one, in step": (
        in_step(worker(0, data_wait_s=0.1, wait_s=6.0), worker(1, data_wait_s=6.5)),
        Cause.SLOW_DATA,
        "worker:1",
        "worker:1 spends 65 % of its time waiting for data",
    ),
    "the interpreter's lock": (
        [with_values(worker(0), thread_cpu_sBARpreparing=8.0, gil_wait_s=0.1, step_cpu_s=4.0), worker(1), ps(0)],
        Cause.INTERPRETER,
        "worker:0",
        "preparing runs 80 % of the time",
    ),
    "threads": (
        [with_values(worker(index), threads=16, cores=4, starved_s=30.0, cpu_s=20.0) for index in (0, 1)],
        Cause.THREADS,
        "",
        "too many threads: 2 workers on one host compute with 32 threads on 4 cores",
    ),
    "the bound": (
        [worker(0, steps=110, gate_wait_s=7.2), worker(1, steps=100), ps(0)],
        Cause.GATE,
        "worker:1",
        "worker:0 spends 72 % of its time waiting at the staleness bound for worker:1",
    ),
    "checkpoints": (
        [
            dataclasses.replace(CHIEF, values={"checkpoints": 12, "checkpoint_s": 5.0}),
            worker(0, wait_s=5),
            ps(0, held_s=5),
        ],
        Cause.CHECKPOINTS,
        "",
        "checkpoints take 50 % of the time",
    ),
    "a worker that saves": ([worker(0, save_s=4.0), worker(1, save_s=0.1)], Cause.CHECKPOINTS, "worker:0", "take 40 %"),
    "a ps at work": (
        [worker(0, wait_s=6), worker(1, wait_s=6.2), ps(0, apply_s=9.1, cpu_s=9.3)],
        Cause.SLOW_PS,
        "ps:0",
        "ps:0 is slow: it is busy 91 % of the time",
    ),
    "a ps at work, on a busy machine": (
        [
            *(with_values(worker(index, wait_s=4), cpu_s=1.5, starved_s=4.0) for index in (0, 1)),
            ps(0, apply_s=4.5, cpu_s=1.0, starved_s=8.0),
        ],
        Cause.SLOW_PS,
        "ps:0",
        "ps:0 is slow: it is busy 45 % of the time",
    ),
    "a ps without a core": (
        [lanes(worker(0, wait_s=4), peer_wait_s={"ps:0": 4}), ps(0, apply_s=0.4, cpu_s=0.3, starved_s=6.0)],
        Cause.NO_CORE,
        "ps:0",
        "ps:0 is ready but gets no core 60 % of the time",
    ),
    "a ps without a core that does as much as a worker": (
        [
            *(
                with_values(lanes(worker(index, wait_s=4), peer_wait_s={"ps:0": 4}), cpu_s=1.5, starved_s=1.0)
                for index in (0, 1)
            ),
            ps(0, apply_s=4.5, cpu_s=1.0, starved_s=8.0),
        ],
        Cause.NO_CORE,
        "ps:0",
        "ps:0 is ready but gets no core 80 % of the time",
    ),
    "a ps that is stopped now and then, where all starve": (
        [
            lanes(worker(0, wait_s=4), peer_wait_s={"ps:0": 4}),
            ps(0, apply_s=0.4, cpu_s=0.3, starved_s=6.0, gil_wait_s=0.5, gil_probes=21),
        ],
        Cause.SLOW_PS,
        "ps:0",
        "ps:0 answers late: workers spend 40 % of their time waiting for it",
    ),
    "two ps that answer late, neither of them much": (
        [
            lanes(worker(0, wait_s=2), peer_wait_s={"ps:0": 1.2, "ps:1": 0.8}),
            ps(0, apply_s=0.1, cpu_s=0.3),
            ps(1, apply_s=0.1, cpu_s=0.3),
        ],
        Cause.NOTHING,
        "",
        "nothing to gain: the workers compute 80 %",
    ),
    "a worker that was away, at the staleness bound": (
        [
            worker(0, gate_wait_s=6.4),
            dataclasses.replace(worker(1, gate_wait_s=2.3), window_s=4.0),
            ps(0),
        ],
        Cause.GATE,
        "worker:1",
        "worker:0 spends 64 % of its time waiting at the staleness bound for worker:1, which has been there for only",
    ),
    "one ps slower than the other": (
        [
            lanes(worker(0, wait_s=6), peer_wait_s={"ps:0": 0.5, "ps:1": 5.5}),
            lanes(worker(1, wait_s=6), peer_wait_s={"ps:0": 0.5, "ps:1": 5.5}),
            ps(0, apply_s=0.5),
            ps(1, apply_s=3.5),
        ],
        Cause.SLOW_PS,
        "ps:1",
        "7.0 x as long as the others",
    ),
    "a hot shard": (
        [
            lanes(worker(0, wait_s=5), peer_wait_s={"ps:0": 4.8, "ps:1": 0.2}),
            lanes(ps(0, apply_s=6.0, cpu_s=6.0), received_bytes={"worker:0/shm": 9e8}),
            lanes(ps(1), received_bytes={"worker:0/shm": 1e8}),
        ],
        Cause.HOT_SHARD,
        "ps:0",
        "ps:0 gets 90 % of the bytes of 2 ps",
    ),
    "a hot shard of few rows": (
        [
            lanes(worker(0, wait_s=1, rows_wait_s=4), peer_wait_s={"ps:0": 0.9, "ps:1": 0.1}),
            lanes(
                ps(0, apply_s=6.0, cpu_s=6.0),
                received_bytes={"worker:0/shm": 9e8},
                row_share={"ids.weight:7": 0.25, "ids.weight:2": 0.5, "other.weight:1": 0.6},
            ),
            lanes(ps(1), received_bytes={"worker:0/shm": 1e8}),
        ],
        Cause.HOT_SHARD,
        "ps:0",
        "ps:0 gets 90 % of the bytes of 2 ps: 2 rows of ids.weight get 75 % of its row updates",
    ),
    "a hot shard of many rows": (
        [
            lanes(worker(0, wait_s=5), peer_wait_s={"ps:0": 4.8, "ps:1": 0.2}),
            lanes(
                ps(0, apply_s=6.0, cpu_s=6.0), received_bytes={"worker:0/shm": 9e8}, row_share={"ids.weight:7": 0.25}
            ),
            lanes(ps(1), received_bytes={"worker:0/shm": 1e8}),
        ],
        Cause.HOT_SHARD,
        "ps:0",
        "of 2 ps: its shard is hot",
    ),
    "most of the few bytes of a tiny model go to one ps": (
        [
            lanes(worker(0, wait_s=5), peer_wait_s={"ps:0": 3.0, "ps:1": 2.0}),
            lanes(ps(0, apply_s=0.8), received_bytes={"worker:0/shm": 1.2e5}),
            lanes(ps(1, apply_s=0.6), received_bytes={"worker:0/shm": 3e4}),
        ],
        Cause.COMMUNICATION,
        "",
        "steps of 100.0 ms are short",
    ),
    "a slow link of a ring": (
        in_step(
            *(
                noted(
                    lanes(
                        worker(index, wait_s=7),
                        sent_bytes={f"worker:{(index + 1) % 3}/tcp": 9e7},
                        link_busy_s={f"worker:{(index + 1) % 3}/tcp": busy_s},
                    ),
                    {"host": f"host {index}"},
                )
                for index, busy_s in enumerate((0.8, 8.1, 0.7))
            )
        ),
        Cause.SLOW_LINK,
        "worker:1",
        "the link worker:1–worker:2 carries 11 MB/s, the others",
    ),
    "tcp within a host, of which one direction is slower": (
        in_step(
            *(
                noted(
                    lanes(
                        worker(index, wait_s=4.5),
                        sent_bytes={f"worker:{1 - index}/tcp": 9e8},
                        link_busy_s={f"worker:{1 - index}/tcp": busy_s},
                    ),
                    {"host": "one", "lane|ring": "ring over tcp, because tcp was asked for", "fallback|ring": "tcp"},
                )
                for index, busy_s in enumerate((4.0, 2.5))
            )
        ),
        Cause.LANE,
        "worker:0",
        "worker:0 talks to ring over a slower lane than it could",
    ),
    "small frames": (
        [lanes(worker(0, wait_s=5), sent_bytes={"ps:0/shm": 1e9}, sent_frames={"ps:0/shm": 250_000}), ps(0, apply_s=5)],
        Cause.SMALL_FRAMES,
        "",
        "frames of 3.9 KiB are too small: worker:0 sends ps:0 2500 of them every step",
    ),
    "a lane that was not had": (
        [
            noted(
                worker(0, wait_s=4),
                {"lane|ps:0": "tcp, because it is on another host", "fallback|ps:0": "no shm lane: /dev/shm is full"},
            ),
            ps(0),
        ],
        Cause.LANE,
        "worker:0",
        "worker:0 talks to ps:0 over a slower lane than it could: tcp (no shm lane: /dev/shm is full)",
    ),
    "short steps": (
        [worker(0, steps=9000, wait_s=6), ps(0, apply_s=1.9, commits=9000)],
        Cause.COMMUNICATION,
        "",
        "worker:0 spends 60 % of its time waiting for communication: steps of 1.1 ms are short",
    ),
    "a silent one": (
        [
            dataclasses.replace(worker(0, steps=0), waiting_on="worker:1 in all_reduce", waiting_s=5.0),
            dataclasses.replace(worker(1, steps=0), silent_s=5.2),
        ],
        Cause.SILENT,
        "worker:1",
        "worker:1 has been silent for 5.2 s",
    ),
    "a lost one": ([worker(0), dataclasses.replace(ps(0), state="lost")], Cause.SILENT, "ps:0", "ps:0 is lost"),
    "a script that stands still": (
        [dataclasses.replace(worker(0, steps=0), waiting_on="worker:1 in barrier", waiting_s=60.0), worker(1, steps=0)],
        Cause.STUCK,
        "worker:1",
        "worker:1 has not finished a step for 10 s, and waits for no other task",
    ),
    "nobody has begun": ([TaskReading("worker:0", state="waiting")], Cause.UNKNOWN, "", "waiting for worker:0 to join"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_cause_is_named(name: str) -> None:
    tasks, cause, task, words = TABLE[name]
    verdict = judge(Reading(tuple(tasks)))
    assert (verdict.cause, verdict.task) == (cause, task), verdict.text()
    assert words in verdict.sentence
    assert "\n" not in verdict.sentence
    assert bool(verdict.advice) == (cause is not Cause.NOTHING)
    if any(one.task.startswith("ps:") for one in tasks):
        refused = [name for name in OF_RING if f"--{name.replace('_', '-')}" in verdict.advice]
        assert not refused and "--frame-bytes" not in verdict.advice, "`stratagem run --ps` takes none of these"


def test_starving_is_told_beside_a_job_that_does_what_it_can() -> None:
    verdict = judge(Reading(tuple(TABLE["all starve alike"][0])))
    assert re.match(r"worker:\d's training thread is ready but gets no core 60 % of the time", verdict.also[0])


def test_starving_is_told_beside_what_it_makes_long() -> None:
    """Twelve workers on two cores had steps that "are short", and nothing else to say of them."""
    verdict = judge(Reading(tuple(with_values(worker(index, wait_s=3.5), starved_main_s=7.0) for index in range(12))))
    assert verdict.cause is Cause.COMMUNICATION and "no core 70 % of the time" in verdict.also[0]
    verdict = judge(Reading(tuple(TABLE["one without a core"][0])))
    assert verdict.cause is Cause.NO_CORE and not verdict.also


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"forward_s": 8.0},
            "what comes before backward(): 101.0 ms per step, that of the others 21.0",
        ),
        ({"backward_s": 8.0}, "its backward(): 122.0 ms per step, that of the others 42.0"),
        ({"optimizer_s": 8.0}, "its optimizer: 85.6 ms per step"),
        ({"script_s": 8.0}, "what comes after its optimizer's step: 81.4 ms per step"),
        ({"forward_s": 4.0, "backward_s": 4.0}, ""),
    ],
)
def test_a_slow_worker_is_told_what_of_its_step_is_slow(more: Mapping[str, float], words: str) -> None:
    usual, slow = worker(0, wait_s=3.0), worker(1, wait_s=3.0)
    slow = with_values(slow, **{name: slow.get(name) + seconds for name, seconds in more.items()})
    verdict = judge(Reading((usual, slow)))
    assert (verdict.cause, verdict.task) == (Cause.SLOW_WORKER, "worker:1"), verdict.text()
    told = [line for line in verdict.evidence if line.startswith("what takes longer")]
    assert len(told) == bool(words) and all(words in line for line in told), verdict.text()


def test_without_a_chief_it_says_so() -> None:
    verdict = judge(Reading(problem="the chief at host:1 does not answer"))
    assert (verdict.cause, verdict.task) == (Cause.CHIEF_AWAY, "chief:0")


def test_a_job_waits_for_a_lost_ps_alone() -> None:
    lost = [dataclasses.replace(task, state="lost") for task in (ps(0), worker(1), TaskReading("evaluator:0"))]
    ends = [judge(Reading((worker(0), task))).sentence.partition(task.task)[2] for task in lost]
    assert ends[:2] == [" is lost, and the job waits until it is restarted", " is lost"]
    silent = TaskReading("evaluator:0", state="live", silent_s=60.0)
    assert all(judge(Reading((worker(0), task))).cause is Cause.NOTHING for task in (lost[2], silent))


def test_a_script_that_saves_is_not_told_an_option_of_the_chiefs_clock() -> None:
    """--checkpoint-every-s is refused without ps, and changes nothing of what a script saves by itself."""
    own, clock = (judge(Reading(tuple(TABLE[name][0]))).advice for name in ("a worker that saves", "checkpoints"))
    assert "blocking=False" in own and "--checkpoint-every-s" not in own and "--checkpoint-every-s" in clock


def test_what_has_an_effect_between_hosts_alone_is_advised_to_a_ring_of_several() -> None:
    """A ring of one host was told to set --wire-dtype, and when it did, that this had no effect."""
    ring = [worker(index, wait_s=6.0) for index in range(2)]
    apart = [noted(one, {"host": one.task}) for one in ring]
    verdicts = [judge(Reading(tuple(in_step(*workers)))) for workers in (ring, apart)]
    assert {one.cause for one in verdicts} == {Cause.COMMUNICATION}
    assert ["--wire-dtype" in one.advice for one in verdicts] == [False, True]


def test_one_whose_script_stands_still_is_named_though_the_others_go_on() -> None:
    """It made no step, so it was left out: "nothing to gain", while what it had leased was not trained for ever."""
    stands_still = worker(1, 0)
    verdict = judge(Reading((worker(0), stands_still, ps(0))))
    assert (verdict.cause, verdict.task) == (Cause.STUCK, "worker:1") and "--stacks" in verdict.advice
    evaluates = with_values(stands_still, **{name: 0.0 for name in COMPUTING}, outside_s=WINDOW_S)
    waits = dataclasses.replace(stands_still, waiting_on="ps:0 to apply its update", waiting_s=1.0)
    for other in (evaluates, waits):
        assert judge(Reading((worker(0), other, ps(0)))).cause is Cause.NOTHING


def test_one_that_is_cut_off_from_a_ps_is_named_though_the_others_go_on() -> None:
    """It waited 29 s for its ps, and `why` spoke of the lane of another worker."""
    cut_off, at_end = (
        dataclasses.replace(worker(1, 0), waiting_on=words, waiting_s=20.0)
        for words in ("ps:1 to apply its update", "worker:0 to finish")
    )
    verdict = judge(Reading((worker(0), cut_off, ps(0), ps(1))))
    assert (verdict.cause, verdict.task) == (Cause.STUCK, "worker:1")
    assert verdict.sentence == "worker:1 has not finished a step for 10 s: it waits for ps:1 to apply its update"
    assert judge(Reading((worker(0), at_end, ps(0), ps(1)))).cause is Cause.NOTHING


def test_who_leaves_an_ending_job_is_not_lost() -> None:
    """The page of a job that Ctrl-C had ended said for good that a worker was lost, and would be restarted."""
    gone = dataclasses.replace(worker(1), state="lost")
    assert judge(Reading((worker(0), gone), is_ending=True)).cause is Cause.NOTHING
    states = tuple(TaskState(f"worker:{index}", state) for index, state in enumerate(("live", "lost")))
    assert not reading_of(StatusView(states)).is_ending
    assert reading_of(StatusView(states, stop_reason="the chief got SIGINT")).is_ending


def test_workers_that_all_are_in_a_long_step_have_finished_some_before() -> None:
    """Two parameter-server workers in steps of 100 s had "not finished a step yet", whatever step it was."""
    verdict = judge(Reading((worker(0, 0), worker(1, 0), ps(0, 0))))
    assert verdict.sentence == "no worker has finished a step in the last 10 s" and "--stacks" in verdict.advice


def test_of_a_run_that_is_over_nobody_asks_again() -> None:
    """A job whose script failed at once had "not finished a step yet", long after its end."""
    verdict = judge(Reading((TaskReading("chief:0", state="done"), worker(0, 0)), is_over=True))
    assert verdict.sentence == "no worker finished a step" and "summary" in verdict.advice


def test_workers_that_all_wait_for_data_are_named_once() -> None:
    """Each was a cause of its own: "every worker spends 80 % of its time", beside it "every worker spends 60 %"."""
    starved = with_values(worker(1, data_wait_s=8.0), starved_main_s=2.5)
    verdict = judge(Reading((worker(0, data_wait_s=8.0), starved, ps(0))))
    assert verdict.sentence.startswith("every worker spends 60 % of its time waiting for data")
    assert not any("waiting for data" in line for line in verdict.also)
    assert [line for line in verdict.evidence if line.endswith("for data")] == [
        "worker:0 waits 80 % of its time for data",
        "worker:1 waits 60 % of its time for data",
    ]


def test_who_sleeps_as_it_reads_lacks_its_cores_elsewhere() -> None:
    """Four workers on two cores that slept 37 % of their time in their dataset: 26 % was said."""
    slow = {"data_wait_cpu_s": 0.12, "step_cpu_s": 1.0, "starved_main_s": 3.75}
    verdict = judge(Reading(tuple(with_values(worker(index, data_wait_s=4.0), **slow) for index in range(4))))
    assert verdict.sentence.startswith("every worker spends 36 % of its time waiting for data")


def test_few_steps_are_no_proof() -> None:
    assert judge(Reading(tuple(in_step(worker(0, 3, wait_s=7.4), worker(1, 3))))).sure.startswith("not sure")
    assert judge(Reading(tuple(in_step(worker(0, wait_s=7.4), worker(1))))).sure == "sure"


def test_json_has_plain_values() -> None:
    import json

    said: dict[str, Any] = json.loads(json.dumps(judge(Reading((worker(0),))).as_json()))
    assert said["cause"] == "nothing" and said["sure"] == "sure" and said["evidence"]


def test_what_a_verdict_looks_up_grows_as_the_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    get = TaskReading.get

    def counted(self: TaskReading, name: str) -> float:
        nonlocal asked
        asked += 1
        return get(self, name)

    monkeypatch.setattr(TaskReading, "get", counted)
    counts = []
    for number in (50, 200):
        asked = 0
        times = {"steps": 10.0, "backward_s": 1.0, "data_wait_s": 3.0, "step_cpu_s": 1.0, "in_step": 1.0}
        slow = times | {"backward_s": 9.0, "step_cpu_s": 9.0}
        workers = (TaskReading(f"worker:{one}", slow if one % 5 == 0 else times, 10.0) for one in range(number))
        assert judge(Reading(tuple(workers))).cause is not Cause.NOTHING
        counts.append(asked)
    assert counts[1] < 5 * counts[0], "each worker is compared with all others by looking at all of them again"
