"""Membership: joins, losses, fences, readiness, the end of the job. Time is passed in."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.chief.journal.history import JobHistory
from stratagem.chief.membership.session import Action, Announce, Dismiss, Fence, Prepare, Release, SessionState, StopJob
from stratagem.chief.membership.sessions import Sessions
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.task import Incarnation
from stratagem.errors import ConfigurationError, FencedError


def make(num_workers: int = 2, num_ps: int = 1, **more: Any) -> Sessions:
    timeouts = {"session_timeout_s": 6.0, "worker_timeout_s": 60.0, "start_timeout_s": 300.0, "session_grace_s": 0.0}
    told = {name: more.pop(name) for name in [*more] if name in ChiefConfig.model_fields}
    config = ChiefConfig(num_workers=num_workers, num_ps=num_ps, **{**timeouts, **told})
    now, live = more.pop("now", 0.0), more.pop("awaited", {})
    return Sessions(config, JobHistory(num_ps=num_ps, live=live, **more), now)


def join(sessions: Sessions, task: str, stream: int, now: float = 0.0, resume: int = 0) -> list[Action]:
    session, actions = sessions.join(task, f"host:{stream}", 1, resume, stream, now)
    if session.task.type == "ps":
        assert Prepare(session.incarnation) in actions
        actions = [*actions, *sessions.prepared(session.incarnation)]
    return actions


def ready(**more: Any) -> Sessions:
    """worker:0 = incarnation 1 on stream 1, worker:1 = 2, ps:0 = 3."""
    sessions = make(**more)
    for stream, task in enumerate(["worker:0", "worker:1", "ps:0"], 1):
        join(sessions, task, stream)
    assert sessions.ready
    return sessions


def is_settled(sessions: Sessions) -> bool:
    return sessions.all_known  # a call: mypy takes a property for the constant it was in the last assert


W0, W1, PS = Incarnation("worker:0", 1), Incarnation("worker:1", 2), Incarnation("ps:0", 3)


def test_nothing_is_ready_before_everybody_joined() -> None:
    sessions = make()
    assert sessions.waiting_for == ["worker:0", "worker:1", "ps:0"]
    join(sessions, "worker:1", 1)
    join(sessions, "ps:0", 2)
    assert (sessions.ready, sessions.waiting_for, sessions.lead) == (False, ["worker:0"], "worker:1")
    join(sessions, "worker:0", 3)
    assert (sessions.ready, sessions.waiting_for, sessions.lead) == (True, [], "worker:0")
    assert [each.number for each in sessions.live("worker")] == [3, 1]


def test_another_spelling_of_a_task_is_refused_and_takes_no_session_away() -> None:
    sessions = ready()
    with pytest.raises(ConfigurationError, match=r"expected a task like 'worker:0'.*got 'ps:00'"):
        join(sessions, "ps:00", 4)
    assert sessions.is_live(PS)


def test_a_second_process_that_only_says_goodbye_does_not_replace_a_worker_that_runs() -> None:
    sessions = ready()
    with pytest.raises(ConfigurationError, match="worker:1 is already running, in process 1 at host:2"):
        sessions.join("worker:1", "", 7, 0, 9, 1.0)
    assert sessions.is_live(W1) and not sessions.fenced


def test_a_ps_is_live_only_after_it_is_prepared() -> None:
    sessions = make(1, 1)
    _, actions = sessions.join("ps:0", "host:1", 1, 0, 1, 0.0)
    assert actions == [Announce(), Prepare(Incarnation("ps:0", 1))]
    assert sessions.servers == [Incarnation("ps:0", 1)] and sessions.live("ps") == []
    assert sessions.prepared(Incarnation("ps:0", 1)) == [Announce()]
    assert sessions.live("ps")
    assert sessions.prepared(Incarnation("ps:0", 1)) == []


def test_a_task_of_another_cluster_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'worker:7' is not a task of this cluster; expected one of worker:0"):
        make().join("worker:7", "", 1, 0, 1, 0.0)


def test_a_lost_worker_is_released_after_every_ps_refused_it() -> None:
    sessions = make(1, 2)
    for stream, task in enumerate(["worker:0", "ps:0", "ps:1"], 1):
        join(sessions, task, stream)
    actions = sessions.stream_ended("worker:0", 1, 1.0)
    incarnation, servers = Incarnation("worker:0", 1), (Incarnation("ps:0", 2), Incarnation("ps:1", 3))
    assert Fence(incarnation, servers) in actions and Announce() in actions
    assert any(isinstance(action, Dismiss) and "connection broke" in action.reason for action in actions)
    assert sessions.fence_acknowledged(incarnation, servers[0]) == []
    assert sessions.fence_acknowledged(incarnation, servers[1]) == [Release(incarnation)]
    assert sessions.fence_acknowledged(incarnation, servers[1]) == []


def test_a_ps_that_is_lost_need_not_acknowledge() -> None:
    sessions = ready()
    sessions.stream_ended("worker:1", 2, 1.0)
    assert Release(W1) in sessions.stream_ended("ps:0", 3, 1.0)


def test_a_lost_worker_without_any_ps_is_released_at_once() -> None:
    sessions = make(1, 0)
    join(sessions, "worker:0", 1)
    assert Release(Incarnation("worker:0", 1)) in sessions.stream_ended("worker:0", 1, 1.0)


def test_silence_loses_a_session_and_heartbeats_keep_it() -> None:
    sessions = ready()
    for stream, task in ((1, "worker:0"), (3, "ps:0")):
        sessions.heartbeat(task, stream, 5.0)
    assert sessions.tick(6.0) == []
    actions = sessions.tick(6.5)
    assert Fence(W1, (PS,)) in actions
    assert any(isinstance(action, Dismiss) and "it was silent for" in action.reason for action in actions)
    assert sessions.tick(6.6) == []
    with pytest.raises(FencedError, match=r"worker:1 .incarnation 2. is not a live member .*; its units go to others"):
        sessions.check(W1)
    sessions.tick(60.0)
    with pytest.raises(FencedError, match=r"ps:0 .incarnation 3. is not a live .* lost\); end the process"):
        sessions.check(PS)


def test_a_chief_that_stood_still_has_heard_of_nobody_in_the_future() -> None:
    """Who was heard of before the chief looked at the time might be silent for as long once more."""
    sessions = ready()
    sessions.heartbeat("worker:0", 1, 100.0)
    sessions.excuse(90.0, 100.5)
    assert [sessions.tasks[task].heard_at for task in ("worker:0", "worker:1")] == [100.5, 90.0]


def test_an_evaluator_that_failed_is_not_back_soon_after_a_chief_stood_still() -> None:
    sessions = ready()
    join(sessions, "evaluator:0", 4)
    sessions.goodbye("evaluator:0", 4, 1, "", 1.0)
    assert not sessions.evaluator_is_back_soon
    sessions.excuse(5.0, 8.0)
    assert not is_back_soon(sessions)


def is_back_soon(sessions: Sessions) -> bool:
    return sessions.evaluator_is_back_soon  # a call, as above


def test_a_ps_that_is_to_end_serves_until_it_is_let_go_and_its_next_process_does_not_leave() -> None:
    sessions = ready()
    assert sessions.heartbeat("ps:0", 3, 1.0, leaving=True) == [Announce()] and sessions.is_live(PS)
    assert sessions.heartbeat("ps:0", 3, 1.5, leaving=True) == []
    (leaving,) = sessions.leaving
    assert Dismiss(PS, 3, f"{PS} is lost: it was shut down, and has handed over what it held") in sessions.let_go(
        leaving, 2.0
    )
    assert sessions.leaving == [] and not sessions.is_live(PS)
    join(sessions, "ps:0", 4)
    assert sessions.leaving == [] and sessions.is_live(Incarnation("ps:0", 4))


def test_a_ps_that_waits_to_serve_and_is_to_end_does_not_wait_any_more() -> None:
    sessions = ready()
    sessions.join("ps:1", "host:4", 1, 0, 4, 1.0)
    assert [str(session.task) for session in sessions.newcomers] == ["ps:1"]
    sessions.heartbeat("ps:1", 4, 2.0, leaving=True)
    assert sessions.newcomers == [] and [str(session.task) for session in sessions.leaving] == ["ps:1"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_who_was_often_late_may_be_silent_or_away_for_longer(is_broken: bool) -> None:
    sessions = ready(session_grace_s=3.0)
    now = 0.0
    for _ in range(40):  # worker:0 comes twice a second, worker:1 every half second or every five
        for pause_s in (0.5, 0.5, 0.5, 4.5):
            for _ in range(int(pause_s / 0.5)):
                now += 0.5
                sessions.heartbeat("worker:0", 1, now)
                sessions.heartbeat("ps:0", 3, now)
            sessions.heartbeat("worker:1", 2, now)
    assert sessions.tasks["worker:0"].heartbeats.phi(1.2) > 3 > sessions.tasks["worker:1"].heartbeats.phi(4.5)
    if is_broken:
        sessions.stream_ended("worker:0", 1, now)
        sessions.stream_ended("worker:1", 2, now)
    bound_s = 3 if is_broken else 6
    assert sessions.tick(now + bound_s - 0.1) == []
    assert [one.incarnation for one in sessions.tick(now + bound_s + 0.1) if isinstance(one, Fence)] == [W0]
    assert sessions.is_live(W1)
    sessions.tick(now + 18.1)
    assert not sessions.is_live(W1)


def test_a_new_process_in_place_of_a_live_one_fences_it() -> None:
    sessions = ready()
    actions = join(sessions, "worker:1", 9, 1.0)
    assert Fence(W1, (PS,)) in actions
    assert sessions.tasks["worker:1"].incarnation == Incarnation("worker:1", 4)
    assert sessions.stream_ended("worker:1", 2, 2.0) == [], (
        "the end of the old stream says nothing about the new incarnation"
    )
    sessions.check(Incarnation("worker:1", 4))


def test_a_resumed_session_goes_on_and_a_fenced_one_does_not() -> None:
    sessions = ready()
    actions = join(sessions, "worker:0", 9, 1.0, resume=1)
    assert Dismiss(W0, 1, "") in actions
    assert sessions.stream_ended("worker:0", 1, 2.0) == []
    sessions.stream_ended("worker:1", 2, 2.0)
    with pytest.raises(FencedError, match="end the process and restart it"):
        join(sessions, "worker:1", 10, 3.0, resume=2)


def test_the_lead_moves_when_it_dies() -> None:
    sessions = ready()
    sessions.stream_ended("worker:0", 1, 1.0)
    assert sessions.lead == "worker:1"


def test_a_lead_that_has_finished_hands_nothing_on() -> None:
    sessions = ready()
    sessions.goodbye("worker:0", 1, 0, "", 1.0)
    assert sessions.lead == "worker:0"


def test_the_job_ends_when_every_worker_said_goodbye() -> None:
    sessions = ready()
    first = sessions.goodbye("worker:0", 1, 0, "", 1.0)
    assert Fence(W0, (PS,)) in first and not any(isinstance(action, StopJob) for action in first)
    assert StopJob(0, "every worker has finished") in sessions.goodbye("worker:1", 2, 0, "", 1.0)
    assert sessions.goodbye("ps:0", 3, 0, "", 2.0)
    assert not sessions.anybody_waits


def test_a_failed_worker_may_come_back_and_its_words_are_kept() -> None:
    sessions = ready()
    sessions.goodbye("worker:1", 2, 1, "ValueError: no such file", 1.0)
    sessions.goodbye("worker:0", 1, 1, "later", 2.0)
    assert sessions.first_failure == "worker:1: ValueError: no such file"
    join(sessions, "worker:1", 9, 3.0)
    join(sessions, "worker:0", 10, 3.0)
    sessions.heartbeat("ps:0", 3, 60.0)
    for task, stream in (("worker:1", 9), ("worker:0", 10)):
        sessions.heartbeat(task, stream, 60.0)
    assert sessions.tick(65.0) == []


def test_who_failed_because_of_another_is_not_the_first_failure() -> None:
    sessions = ready()
    sessions.goodbye("worker:0", 1, 1, "CollectiveError: worker:1 left", 1.0, follows=True)
    sessions.goodbye("worker:1", 2, 1, "ValueError: no such file", 2.0)
    assert sessions.first_failure == "worker:1: ValueError: no such file"


def test_a_worker_that_stays_away_stops_the_job() -> None:
    sessions = ready()
    sessions.goodbye("worker:1", 2, 1, "ValueError: no such file", 1.0)
    for task, stream in (("worker:0", 1), ("ps:0", 3)):
        sessions.heartbeat(task, stream, 61.5)
    [stop] = sessions.tick(61.5)
    assert isinstance(stop, StopJob) and stop.exit_code == 1
    assert "worker:1 was lost" in stop.reason and "first failure: worker:1: ValueError" in stop.reason


def test_a_worker_that_stays_away_while_the_others_finished_does_no_harm() -> None:
    sessions = ready()
    sessions.stream_ended("worker:1", 2, 1.0)
    sessions.goodbye("worker:0", 1, 0, "", 2.0)
    sessions.heartbeat("ps:0", 3, 61.5)
    assert sessions.tick(61.5) == [StopJob(0, "every worker but worker:1 has finished the work")]


def test_the_only_worker_lost_is_a_failure() -> None:
    sessions = make(1, 0)
    join(sessions, "worker:0", 1)
    sessions.stream_ended("worker:0", 1, 1.0)
    [stop] = sessions.tick(62.0)
    assert isinstance(stop, StopJob) and stop.exit_code == 1


@pytest.mark.parametrize("exit_code", [2, 42])
def test_a_hopeless_exit_stops_the_job_at_once(exit_code: int) -> None:
    actions = ready().goodbye("worker:0", 1, exit_code, "bad flag", 1.0)
    [stop] = [action for action in actions if isinstance(action, StopJob)]
    assert stop.exit_code == exit_code and "bad flag" in stop.reason


def test_a_cluster_that_does_not_come_up_names_who_is_missing() -> None:
    sessions = make(start_timeout_s=10.0)
    join(sessions, "worker:0", 1, 9.0)
    assert sessions.tick(10.0) == []
    [stop] = sessions.tick(10.1)
    assert isinstance(stop, StopJob) and stop.reason.endswith("10 s (start_timeout_s); still missing: worker:1, ps:0")


def test_a_cluster_nobody_of_which_is_there_is_not_given_up() -> None:
    """Scripts of torch.distributed join only to say goodbye, others perhaps when they have read their data."""
    sessions = make(2, 0, start_timeout_s=10.0)
    assert sessions.tick(1000.0) == []
    join(sessions, "worker:0", 1, 1000.0)
    sessions.goodbye("worker:0", 1, 0, "", 1000.0)
    assert sessions.tick(2000.0) == []
    join(sessions, "worker:1", 2, 2000.0)
    assert sessions.ready


def test_the_first_task_of_a_cluster_has_its_time_to_wait_for_the_others() -> None:
    sessions = make(2, 0, start_timeout_s=10.0)
    join(sessions, "worker:0", 1, 1000.0)
    sessions.heartbeat("worker:0", 1, 1010.0)
    assert sessions.tick(1010.0) == []
    [stop] = sessions.tick(1010.1)
    assert isinstance(stop, StopJob) and stop.reason.endswith("still missing: worker:1")


def test_a_restarted_chief_waits_for_the_sessions_that_were_live() -> None:
    sessions = make(
        newest_incarnation=3,
        awaited={"worker:0": 1, "worker:1": 2, "ps:0": 3},
        prepared={"ps:0": 3},
        ready=True,
        now=100.0,
    )
    assert not is_settled(sessions)
    join(sessions, "ps:0", 1, 101.0, resume=3)
    join(sessions, "worker:0", 2, 101.0, resume=1)
    assert not is_settled(sessions)
    sessions.check(W1)
    for task, stream in (("ps:0", 1), ("worker:0", 2)):
        sessions.heartbeat(task, stream, 118.0)
    assert sessions.tick(117.5) == [], "it may look for the chief at its new address"
    assert Fence(W1, (PS,)) in sessions.tick(118.5)
    assert is_settled(sessions) and sessions.tasks["ps:0"].resumed
    join(sessions, "worker:1", 3, 119.0)
    assert sessions.tasks["worker:1"].number == 4


def test_a_restarted_chief_knows_the_process_of_a_worker_that_stays_out_of_reach() -> None:
    sessions = make(newest_incarnation=1, awaited={"worker:0": 1}, pids={"worker:0": 17}, ready=True)
    sessions.tick(18.5)
    assert sessions.tasks["worker:0"].state is SessionState.LOST
    assert sessions.tasks["worker:0"].pid == 17, "its launcher ends what it knows by this number"


def test_a_restarted_chief_remembers_who_was_done_or_lost() -> None:
    sessions = make(newest_incarnation=3, done={"worker:0": 1}, fenced={"worker:1": 2}, ready=True, awaited={"ps:0": 3})
    assert sessions.tasks["worker:0"].state is SessionState.DONE
    assert sessions.tasks["worker:1"].state is SessionState.LOST
    with pytest.raises(FencedError):
        sessions.join("worker:1", "", 1, 2, 1, 0.0)


def test_a_restarted_chief_does_not_take_the_age_of_the_machine_for_the_silence_of_a_lost_task() -> None:
    sessions = make(fenced={"worker:1": 2}, ready=True, awaited={"ps:0": 3}, now=46_000.0)
    assert sessions.tasks["worker:1"].state is SessionState.LOST
    assert {session.heard_at for session in sessions.known if session.number} == {46_000.0}


def end_of(sessions: Sessions) -> int | None:
    return sessions.stopping.exit_code if sessions.stopping is not None else None


@pytest.mark.parametrize("is_back", [True, False], ids=["ps-is-back", "ps-is-gone"])
def test_a_chief_that_restarts_after_the_last_goodbye_ends_the_job(is_back: bool) -> None:
    sessions = make(newest_incarnation=3, done={"worker:0": 1, "worker:1": 2}, awaited={"ps:0": 3}, ready=True)
    assert sessions.tick(1.0) == [], "a last checkpoint needs the ps"
    if is_back:
        join(sessions, "ps:0", 1, 2.0, resume=3)
    sessions.tick(18.5 if not is_back else 3.0)
    assert end_of(sessions) == 0 and sessions.stopping == StopJob(0, "every worker has finished")


def test_a_chief_that_restarts_in_mid_job_does_not_end_it() -> None:
    sessions = make(newest_incarnation=3, done={"worker:0": 1}, awaited={"ps:0": 3, "worker:1": 2}, ready=True)
    join(sessions, "ps:0", 1, 1.0, resume=3)
    sessions.heartbeat("ps:0", 1, 18.0)
    sessions.tick(18.5)  # worker:1 is lost
    assert is_settled(sessions) and end_of(sessions) is None


def test_workers_beyond_those_waited_for_come_and_go() -> None:
    sessions = ready(max_workers=4, session_timeout_s=1000.0)
    with pytest.raises(ConfigurationError, match="is not a task of this cluster"):
        join(sessions, "worker:4", 9)
    assert Announce() in join(sessions, "worker:3", 4)
    join(sessions, "worker:2", 5)
    assert [str(each.task) for each in sessions.known] == ["worker:0", "worker:1", "worker:2", "worker:3", "ps:0"]
    assert [one.task for one in sessions.live("worker")] == [f"worker:{i}" for i in range(4)]
    for stream, worker in ((1, "worker:0"), (2, "worker:1"), (5, "worker:2")):
        assert sessions.goodbye(worker, stream, 0, "", now=1.0)
    assert end_of(sessions) is None, "worker:3 has not finished"
    sessions.stream_ended("worker:3", 4, now=2.0)
    assert sessions.tick(now=50.0) == [] and end_of(sessions) is None, "it may come back"
    (stop,) = sessions.tick(now=63.0)
    assert isinstance(stop, StopJob) and stop.exit_code == 0


def test_an_additional_worker_that_is_gone_for_long_is_not_missed() -> None:
    sessions = ready(max_workers=3)
    join(sessions, "worker:2", 4)
    sessions.stream_ended("worker:2", 4, now=1.0)
    for task, stream in (("worker:0", 1), ("worker:1", 2), ("ps:0", 3)):
        sessions.heartbeat(task, stream, now=99.0)
    assert sessions.tick(now=100.0) == [] and end_of(sessions) is None
    sessions.goodbye("worker:0", 1, 0, "", now=101.0)
    assert sessions.goodbye("worker:1", 2, 0, "", now=101.0)
    assert end_of(sessions) == 0
    again = ready(max_workers=3)
    join(again, "worker:2", 4)
    again.stream_ended("worker:2", 4, now=1.0)
    again.tick(now=2.0)
    join(again, "worker:2", 5, now=62.0)
    again.goodbye("worker:0", 1, 0, "", now=63.0)
    again.goodbye("worker:1", 2, 0, "", now=63.0)
    assert end_of(again) is None, "it is back, and has work to do"


def test_no_worker_is_added_to_a_ring() -> None:
    sessions = make(num_ps=0, max_workers=4)
    with pytest.raises(ConfigurationError, match="it admits no further worker"):
        join(sessions, "worker:2", 1)


def test_an_added_worker_that_cannot_work_does_not_end_the_job() -> None:
    sessions = ready(max_workers=3)
    join(sessions, "worker:2", 4)
    sessions.goodbye("worker:2", 4, 2, "ConfigurationError: added at staleness 0", now=1.0)
    assert end_of(sessions) is None
    assert any(isinstance(each, StopJob) for each in sessions.goodbye("worker:1", 2, 2, "ConfigurationError", now=2.0))


def test_a_restarted_chief_knows_its_additional_workers() -> None:
    sessions = make(max_workers=3, awaited={"worker:2": 7, "worker:0": 5}, done={"worker:1": 6}, ready=True)
    assert sessions.tasks["worker:2"].state is SessionState.AWAITED
    assert make(awaited={"worker:2": 7}).tasks["worker:2"].state is SessionState.AWAITED, "though it takes fewer now"


def broken() -> Sessions:
    """Two workers and a ps with a grace of 3 s; the stream of worker:1 broke off at 1."""
    sessions = ready(session_grace_s=3.0)
    assert sessions.stream_ended("worker:1", 2, 1.0) == []
    return sessions


def test_a_session_that_comes_back_within_its_grace_has_lost_nothing() -> None:
    sessions = broken()
    assert sessions.tick(3.9) == [] and sessions.is_live(W1)
    session, actions = sessions.join("worker:1", "", 1, W1.number, 9, 3.9)
    assert session.incarnation == W1 and actions == [Announce()]
    assert sessions.tick(4.1) == [] and not sessions.fenced


def test_a_session_that_stays_away_is_lost_when_its_grace_is_over() -> None:
    sessions = broken()
    (dismissed, *_) = sessions.tick(4.1)
    assert isinstance(dismissed, Dismiss)
    assert "worker:1" in dismissed.reason and "broke without a goodbye 3.1 s ago" in dismissed.reason
    assert sessions.fenced == {"worker:1": W1.number}


def test_a_grace_ends_when_nothing_listens_there_any_more_or_another_process_comes() -> None:
    sessions = broken()
    assert any(
        "nothing listens" in action.reason for action in sessions.nobody_there(W1, 1.1) if isinstance(action, Dismiss)
    )
    assert sessions.nobody_there(W1, 1.2) == [], "it is lost already"
    sessions = broken()
    sessions.join("worker:1", "", 1, W1.number, 9, 1.1)
    assert sessions.nobody_there(W1, 1.2) == [], "it has come back meanwhile"
    sessions = broken()
    _, actions = sessions.join("worker:1", "elsewhere:9", 7, 0, 9, 1.1)
    told = [action.reason for action in actions if isinstance(action, Dismiss)]
    assert told and all("a new process joined in its place (process 7 at elsewhere:9)" in reason for reason in told)


def test_who_breaks_off_while_the_job_ends_is_not_waited_for() -> None:
    sessions = ready(session_grace_s=3.0)
    sessions.stop(0, "done")
    assert any(isinstance(action, Dismiss) for action in sessions.stream_ended("worker:1", 2, 1.0))
    assert sessions.stream_ended("ps:0", 3, 1.0) == [], "but a ps, whose memory is in the last checkpoint"
    assert sessions.absent_servers == ["ps:0"]
    assert any(isinstance(action, Dismiss) for action in sessions.tick(4.1))


def ring(**more: Any) -> Sessions:
    """worker:0 … worker:2, incarnations 1 … 3 on streams of these numbers, of which two are enough."""
    sessions = make(num_workers=3, num_ps=0, min_workers=2, **more)
    for stream in (1, 2, 3):
        join(sessions, f"worker:{stream - 1}", stream)
    return sessions


def test_a_ring_goes_on_without_a_lost_worker_however_long_and_ends_well() -> None:
    sessions = ring()
    before = sessions.generation
    sessions.stream_ended("worker:1", 2, 1.0)
    assert sessions.generation > before
    for stream in (1, 3):
        sessions.heartbeat(f"worker:{stream - 1}", stream, 100.0)
    assert sessions.tick(100.0) == []
    sessions.goodbye("worker:0", 1, 0, "", 101.0)
    assert sessions.stopping is None
    assert sessions.goodbye("worker:2", 3, 0, "", 102.0)[-1] == StopJob(0, "every worker has finished")


def test_a_ring_with_too_few_ranks_left_is_given_up_at_once_whoever_has_come_back() -> None:
    sessions = ring()
    sessions.stream_ended("worker:1", 2, 1.0)
    join(sessions, "worker:1", 4, 2.0)
    stop = sessions.stream_ended("worker:2", 3, 3.0)[-1]
    assert stop == StopJob(1, "fewer than --min-workers 2 are left; start the job again"), "a newcomer is no rank"
    sessions = ring()
    sessions.goodbye("worker:0", 1, 0, "", 1.0)
    sessions.stream_ended("worker:1", 2, 1.0)
    sessions.stream_ended("worker:2", 3, 1.0)
    assert sessions.stopping == StopJob(0, "every worker has finished"), "one has all of it"
    sessions = ring()
    for index in range(3):
        sessions.goodbye(f"worker:{index}", index + 1, 1, "ZeroDivisionError", 1.0)
    assert sessions.stopping is not None and sessions.stopping.exit_code == 1
    assert sessions.stopping.reason.endswith("start the job again; first failure: worker:0: ZeroDivisionError")


def test_a_ring_whose_workers_were_told_to_end_has_not_failed() -> None:
    sessions = ring()
    sessions.goodbye("worker:1", 2, 143, "preempted: saved a/step-7; restart the job", 1.0)
    stop = sessions.goodbye("worker:0", 1, 143, "preempted: saved a/step-7; restart the job", 1.0)[-1]
    assert isinstance(stop, StopJob) and stop.exit_code == 143
    assert stop.reason.startswith("its workers were told to end; first failure: worker:1: preempted: saved a/step-7")


def test_a_chief_that_is_started_again_when_the_last_rank_is_lost_gives_the_ring_up() -> None:
    fenced = {"worker:0": 1, "worker:1": 2, "worker:2": 3}
    more = {"newest_incarnation": 4, "fenced": fenced, "ready": True, "joining": {"worker:1": 4}}
    again = make(num_workers=3, num_ps=0, min_workers=2, awaited={"worker:1": 4}, **more)
    assert again.tick(0.5) == [], "it may know a rank that comes"
    again.join("worker:1", "host:1", 1, 4, 5, 1.0)
    join(again, "worker:0", 6, 1.0)
    assert again.tick(1.5)[-1] == StopJob(1, "fewer than --min-workers 2 are left; start the job again")


def test_generations_grow_over_losses_and_over_restarts_of_the_chief() -> None:
    sessions = ring()
    first = sessions.generation
    sessions.stream_ended("worker:1", 2, 1.0)
    second = sessions.generation
    sessions.goodbye("worker:0", 1, 0, "", 1.0)
    assert sessions.generation == second > first, "who has finished leaves no gap"
    again = make(
        num_workers=3,
        num_ps=0,
        min_workers=2,
        newest_incarnation=3,
        awaited={"worker:2": 3},
        done={"worker:0": 1},
        fenced={"worker:1": 2},
        ready=True,
    )
    assert again.generation == second
    assert make(num_workers=3, num_ps=0).generation == 0


def test_a_worker_beyond_those_at_the_start_that_was_lost_counts_for_the_next_chief_too() -> None:
    """The generation was one that is over: the workers refused each other until the ring gave up."""
    sessions = ring(max_workers=4)
    join(sessions, "worker:3", 4, 1.0)
    sessions.stream_ended("worker:3", 4, 2.0)
    again = make(
        num_workers=3,
        num_ps=0,
        min_workers=2,
        max_workers=4,
        newest_incarnation=4,
        awaited={f"worker:{index}": index + 1 for index in range(3)},
        fenced={"worker:3": 4},
        ready=True,
    )
    assert again.generation == sessions.generation


def test_a_ring_takes_a_newcomer_in_when_it_says_so_and_the_newcomer_waits() -> None:
    sessions = ring(max_workers=4)
    sessions.stream_ended("worker:0", 1, 1.0)
    generations = [sessions.generation]
    with pytest.raises(ConfigurationError, match="A ring is as large as it started or as max_workers says"):
        join(sessions, "worker:4", 4, 2.0)
    again, other = Incarnation("worker:0", 4), Incarnation("worker:3", 5)
    for stream, one in enumerate((again, other), 4):
        join(sessions, one.task, stream, 2.0)
        assert sessions.tasks[one.task].incarnation == one
    generations.append(sessions.generation)
    oldest = Incarnation("worker:1", 2)
    assert sessions.take_in(oldest, [again]) == [], "it does not wait yet"
    assert sessions.take_in(oldest, []) == [] and not sessions.tasks["worker:1"].waits, "who is in waits for nothing"
    for one in (again, other):
        sessions.take_in(one, [])
    sessions.goodbye("worker:3", 5, 2, "it failed", 3.0)
    assert sessions.stopping is None, "the ring has never had it"
    assert sessions.take_in(oldest, [again, other]) == [again]
    generations.append(sessions.generation)
    assert generations == sorted(set(generations)), "each change grows"
    assert sessions.lead == "worker:1", "who came later leads later"
    sessions.goodbye("worker:1", 2, 0, "", 4.0)
    sessions.stream_ended("worker:2", 3, 4.0)
    assert sessions.goodbye("worker:0", 4, 0, "", 5.0)[-1] == StopJob(0, "every worker has finished")


def test_a_newcomer_that_cannot_stay_in_a_ring_does_not_end_the_job() -> None:
    """Once it is a rank it gets what the others have, and may find that it does not fit."""
    sessions = ring()
    sessions.stream_ended("worker:0", 1, 1.0)
    again = Incarnation("worker:0", 4)
    join(sessions, "worker:0", 4, 2.0)
    sessions.take_in(again, [])
    assert sessions.take_in(Incarnation("worker:1", 2), [again]) == [again]
    sessions.goodbye("worker:0", 4, 2, "ConfigurationError: the Linear that this worker prepared differs", 3.0)
    assert sessions.stopping is None
    sessions.goodbye("worker:1", 2, 2, "ConfigurationError", 4.0)
    assert sessions.stopping is not None


def test_a_chief_that_is_started_again_knows_who_was_taken_in() -> None:
    more = {"newest_incarnation": 5, "fenced": {"worker:0": 1}, "ready": True, "max_workers": 4}
    awaited = {"worker:0": 4, "worker:1": 2, "worker:2": 3, "worker:3": 5}
    late = {"joining": {"worker:3": 5}, "taken_in": {"worker:0": 4}}
    again = make(num_workers=3, num_ps=0, min_workers=2, awaited=awaited, **late, **more)
    for stream, (task, number) in enumerate(awaited.items(), 6):
        again.join(task, "host:1", 1, number, stream, 1.0)
    assert [task for task, session in again.tasks.items() if session.joining] == ["worker:3"]
    assert again.generation == 2 * (4 + 2 + 3 + 5) - 1 and again.lead == "worker:1"


@pytest.mark.parametrize(("num_workers", "num_ps"), [(3, 1), (1, 0)])
def test_min_workers_are_of_a_ring_and_no_more_than_it_has(num_workers: int, num_ps: int) -> None:
    with pytest.raises(ConfigurationError, match="min_workers says with how many"):
        make(num_workers=num_workers, num_ps=num_ps, min_workers=2)


def test_the_number_of_workers_changes_while_training_runs() -> None:
    sessions = ready()
    with pytest.raises(ConfigurationError, match="is not a task of this cluster"):
        join(sessions, "worker:2", 4)
    assert sessions.want_workers(3) == [Announce()]
    join(sessions, "worker:2", 4)
    assert [one.task for one in sessions.live("worker")] == ["worker:0", "worker:1", "worker:2"]
    assert sessions.want_workers(1) == [Announce()]
    assert sessions.required == ["worker:0", "ps:0"]
    assert [str(s.task) for s in sessions.tasks.values() if sessions.is_dismissed(s)] == ["worker:1", "worker:2"]
    sessions.goodbye("worker:2", 4, 0, "", 1.0)
    with pytest.raises(
        ConfigurationError, match=r"the job continues with 1 workers, until `.* --workers 3` requests it"
    ):
        join(sessions, "worker:2", 5)
    assert not sessions.is_wanted_again(sessions.tasks["worker:2"])
    sessions.want_workers(3)
    assert [str(s.task) for s in sessions.tasks.values() if sessions.is_wanted_again(s)] == ["worker:2"]
    sessions.want_workers(1)
    sessions.stream_ended("worker:1", 2, 2.0)  # it dies instead of ending: nobody waits for it
    for task, stream in (("worker:0", 1), ("ps:0", 3)):
        sessions.heartbeat(task, stream, 1000.0)
    sessions.tick(1000.0)
    assert sessions.stopping is None
    actions = sessions.goodbye("worker:0", 1, 0, "", 1001.0)
    assert actions[-1] == StopJob(0, "every worker has finished")


def test_a_chief_that_is_back_knows_how_many_workers_there_are_to_be() -> None:
    live = {"worker:0": 1, "worker:1": 2, "worker:2": 4, "ps:0": 3}
    sessions = make(newest_incarnation=4, awaited=live, ready=True, wanted_workers=3)
    join(sessions, "worker:2", 1, resume=4)
    assert not sessions.is_dismissed(sessions.tasks["worker:2"])


def test_a_chief_that_is_back_fences_a_worker_that_is_wanted_no_more() -> None:
    """It did not know the worker, and what that held went to others while it trained on."""
    live = {"worker:0": 1, "worker:2": 4, "ps:0": 3}
    sessions = make(newest_incarnation=4, awaited=live, ready=True, wanted_workers=1)
    join(sessions, "ps:0", 1, resume=3)
    join(sessions, "worker:0", 2, resume=1)
    assert not is_settled(sessions), "it may come back and end by itself"
    for task, stream in (("ps:0", 1), ("worker:0", 2)):
        sessions.heartbeat(task, stream, 100.0)
    assert Fence(Incarnation("worker:2", 4), (PS,)) in sessions.tick(100.0)


def test_a_worker_that_came_when_it_was_wanted_no_more_is_not_waited_for() -> None:
    sessions = ready()
    sessions.want_workers(3)
    sessions.want_workers(1)
    with pytest.raises(ConfigurationError, match="worker:2 is not wanted"):
        join(sessions, "worker:2", 4)
    sessions.goodbye("worker:1", 2, 0, "", 1.0)
    assert sessions.goodbye("worker:0", 1, 0, "", 1.0)[-1] == StopJob(0, "every worker has finished")


def test_a_job_that_all_have_left_has_the_time_of_a_start_to_come_again() -> None:
    """A worker that needed longer than ``worker_timeout_s`` ended it: started after the ps were healthy, say."""
    left = {"worker:0": 1, "worker:1": 2}
    sessions = make(newest_incarnation=3, fenced=left, ready=True)
    assert sessions.tick(299.0) == []
    [stop] = [action for action in sessions.tick(301.0) if isinstance(action, StopJob)]
    assert stop.reason.startswith("worker:0 was lost 301 s ago and did not return (worker_timeout_s; ")
    assert "STRATAGEM_WORKER_TIMEOUT_S" in stop.reason
    sessions = make(newest_incarnation=3, fenced=left, awaited={"ps:0": 3}, ready=True)
    [stop] = [action for action in sessions.tick(61.0) if isinstance(action, StopJob)]
    assert stop.reason.startswith("worker:0 was lost 61 s ago")


def test_of_several_workers_that_did_not_return_the_first_that_was_lost_is_named() -> None:
    """The others of its ring end with it, and within the same tick."""
    sessions = ready()
    sessions.stream_ended("worker:1", 2, 1.0)
    sessions.goodbye("worker:0", 1, 1, "", 1.1, follows=True)
    [stop] = [action for action in sessions.tick(62.0) if isinstance(action, StopJob)]
    assert stop.reason.startswith("worker:1 was lost 61 s ago")
    assert stop.reason.endswith("; its connection broke without a goodbye")
