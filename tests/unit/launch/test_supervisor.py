"""The supervisor, event by event."""

from __future__ import annotations

import dataclasses
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stratagem.cluster.task import TaskId
from stratagem.launch.actions import Action, Finish, Kill, Renew, Say, Signal, Start, describe_exit
from stratagem.launch.supervisor import LATE_S, Phase, Policy, Supervisor

CHIEF, STANDBY, PS, W0, W1 = (
    TaskId("chief", 0),
    TaskId("chief", 1),
    TaskId("ps", 0),
    TaskId("worker", 0),
    TaskId("worker", 1),
)
EVALUATOR = TaskId("evaluator", 0)
POLICY = Policy(max_restarts=2, shutdown_timeout_s=10.0, failure_timeout_s=4.0, start_timeout_s=30.0)


def _running(policy: Policy = POLICY) -> Supervisor:
    supervisor = Supervisor([W0, W1], [CHIEF, PS], policy)
    assert supervisor.begin(0.0) == [Start(CHIEF)]
    assert supervisor.listening(CHIEF) == [Start(PS), Start(W0), Start(W1)]
    return supervisor


def _deadline(supervisor: Supervisor) -> float | None:
    """When it will do something by itself."""
    return min((at for at in (supervisor._deadline, supervisor._late_at) if at is not None), default=None)


def _alone() -> Supervisor:
    supervisor = Supervisor([W0], policy=POLICY)
    assert supervisor.begin(0.0) == [Start(W0)]
    return supervisor


def test_a_chief_that_listens_is_not_late_while_the_others_cannot_be_started_yet() -> None:
    """As on a busy machine, where the process that they are forked from still loads torch."""
    supervisor = Supervisor([W0, W1], [CHIEF, PS], POLICY)
    supervisor.begin(0.0)
    assert supervisor.listening(CHIEF, can_start=False) == []
    assert supervisor.ticked(31.0) == [] and supervisor.failure is None
    assert supervisor.listening(CHIEF) == [Start(PS), Start(W0), Start(W1)]


def test_a_job_that_goes_well() -> None:
    supervisor = _running()
    assert supervisor.exited(W1, 0, 5.0) == []
    assert supervisor.exited(W0, 0, 6.0) == []
    assert (supervisor.phase, _deadline(supervisor)) == (Phase.DRAINING, 16.0)
    assert supervisor.exited(CHIEF, 0, 7.0) == []
    assert supervisor.exited(PS, 0, 7.1) == [Finish(0)]
    assert supervisor.failure is None


def test_a_job_ends_well_without_a_worker_that_stands_still_when_the_others_have_done_the_work() -> None:
    """It was waited for, without end if it never went on, and then the job had failed."""
    supervisor = _running()
    supervisor.stepped([W0, W1])
    supervisor.away([W1], 4.0)
    supervisor.exited(W0, 0, 5.0)
    supervisor.exited(PS, 0, 6.0)
    assert supervisor.exited(CHIEF, 0, 6.0) == []
    assert supervisor.ticked(9.0) == [Kill(W1)]
    assert supervisor.exited(W1, -9, 9.1) == [Finish(0)]
    supervisor = _running()
    supervisor.stepped([W0, W1])
    supervisor.away([W1], 4.0)
    supervisor.exited(W0, 0, 5.0)
    supervisor.exited(PS, 0, 6.0)
    supervisor.exited(CHIEF, 0, 6.0)
    assert supervisor.exited(W1, 1, 7.0) == [Finish(0)], "it has heard that it is lost"
    assert supervisor.failure is None


def test_a_worker_that_is_lost_and_does_not_end_is_killed_and_started_again() -> None:
    """Its script was in a step that took longer than the chief waits for a lost task: the job ended."""
    supervisor = _running()
    supervisor.stepped([W0, W1])
    supervisor.away([W1], 4.0)
    supervisor.away([W1], 5.0)
    assert supervisor.ticked(13.9) == []
    [kill] = supervisor.ticked(14.0)
    assert isinstance(kill, Kill) and kill.task == W1 and "restarting it" in kill.reason
    assert supervisor.ticked(14.1) == []
    assert supervisor.exited(W1, -9, 14.2) == [Start(W1)]
    supervisor.away([], 14.3)
    assert supervisor.ticked(60.0) == []


@pytest.mark.parametrize("is_over", [False, True])
def test_a_ps_that_stands_still_is_killed_in_time_for_another_and_not_at_once(is_over: bool) -> None:
    """The job ended after a minute. The chief waits for it with the last checkpoint, too."""
    supervisor = _running()
    supervisor.away([PS], 4.0)
    if is_over:
        supervisor.exited(W0, 0, 5.0)
        supervisor.exited(W1, 0, 5.0)
        supervisor.answered(33.0)
    assert supervisor.ticked(33.9) == []
    [kill] = supervisor.ticked(34.0)
    assert isinstance(kill, Kill) and kill.task == PS
    assert supervisor.exited(PS, -9, 34.2) == [Start(PS)]


def test_a_ps_with_a_copy_that_stands_still_is_killed_soon() -> None:
    supervisor = _running(dataclasses.replace(POLICY, has_copies=True))
    supervisor.away([PS], 4.0)
    [kill] = supervisor.ticked(14.0)
    assert isinstance(kill, Kill) and kill.task == PS


def test_the_successor_of_a_worker_that_was_lost_is_left_alone_while_no_chief_says_who_is() -> None:
    supervisor = _running()
    supervisor.stepped([W0, W1])
    supervisor.away([W1], 4.0)
    assert supervisor.exited(W1, 1, 5.0) == [Start(W1)], "it has heard that it is lost"
    assert supervisor.ticked(60.0) == []


def test_a_worker_that_is_lost_and_may_not_be_started_again_is_left_alone() -> None:
    supervisor = _running(dataclasses.replace(POLICY, max_restarts=0))
    supervisor.away([W1], 4.0)
    assert supervisor.ticked(60.0) == []


def test_a_chief_that_answers_has_the_time_that_the_last_checkpoint_takes() -> None:
    """One that took longer than the shutdown timeout was broken off, and the work since the one before was lost."""
    supervisor = _running()
    supervisor.answered(4.0)
    assert _deadline(supervisor) is None
    supervisor.exited(W1, 0, 5.0)
    supervisor.exited(W0, 0, 6.0)
    supervisor.answered(15.0)
    assert supervisor.ticked(24.0) == []
    supervisor.ticked(25.0)
    assert supervisor.failure is not None and supervisor.failure.reason.startswith("still running 10 s after")


def _two_chiefs(policy: Policy = POLICY) -> Supervisor:
    supervisor = Supervisor([W0], [CHIEF, STANDBY, PS], policy)
    assert supervisor.begin(0.0) == [Start(CHIEF)]
    assert supervisor.listening(CHIEF) == [Start(STANDBY), Start(PS), Start(W0)]
    return supervisor


def test_each_of_two_chiefs_is_started_again() -> None:
    supervisor = _two_chiefs()
    assert supervisor.exited(CHIEF, -9, 1.0) == [Start(CHIEF)]
    assert supervisor.exited(STANDBY, 143, 2.0) == [Start(STANDBY)]
    assert supervisor.exited(CHIEF, -9, 3.0) == [], "no restart is left, and one is enough"
    assert supervisor.exited(STANDBY, -9, 4.0) != [] and supervisor.failure is not None


def test_of_two_chiefs_one_ends_the_job() -> None:
    supervisor = _two_chiefs()
    supervisor.exited(W0, 0, 5.0)
    assert supervisor.exited(CHIEF, -9, 6.0) == [] and supervisor.failure is None, "the other goes on"
    assert supervisor.exited(STANDBY, 0, 7.0) == []
    assert supervisor.exited(PS, 0, 7.1) == [Finish(0)]


def test_a_chief_that_came_to_stand_by_for_a_job_that_is_over() -> None:
    supervisor = _two_chiefs()
    for task in (W0, STANDBY, PS):
        assert supervisor.exited(task, 0, 5.0) == []
    assert supervisor.ticked(100.0) == [Kill(CHIEF)]
    assert supervisor.exited(CHIEF, -9, 100.1) == [Finish(0)]


def test_a_chief_that_is_started_again_when_the_job_ends_begins_no_other() -> None:
    supervisor = _two_chiefs()
    assert supervisor.exited(CHIEF, -9, 4.0) == [Start(CHIEF)]
    assert supervisor.exited(W0, 0, 5.0) == []
    assert supervisor.exited(STANDBY, 0, 5.0) == [Kill(CHIEF)]
    assert supervisor.exited(CHIEF, -9, 5.1) == []
    assert supervisor.exited(PS, 0, 5.2) == [Finish(0)]


def test_the_ps_are_told_to_end_when_no_chief_is_left() -> None:
    supervisor = _two_chiefs()
    assert supervisor.interrupted(signal.SIGTERM, 1.0) == [
        Signal(task, signal.SIGTERM) for task in (W0, CHIEF, STANDBY)
    ]
    assert supervisor.exited(STANDBY, 143, 1.1) == []
    assert supervisor.exited(CHIEF, 143, 2.0) == [Signal(PS, signal.SIGTERM)]


def test_a_ps_that_dies_before_the_last_checkpoint_is_started_again() -> None:
    supervisor = _running()
    for task in (W1, W0):
        assert supervisor.exited(task, 0, 5.0) == []
    assert supervisor.exited(PS, -9, 6.0) == [Start(PS)]
    assert supervisor.exited(CHIEF, 0, 7.0) == []
    assert supervisor.exited(PS, -9, 7.5) == [Finish(1)], "no chief would answer another life"


def test_a_chief_that_dies_with_the_last_checkpoint_to_do_is_started_again() -> None:
    """The job had failed, and the work since the last checkpoint was lost; the next chief goes on from the journal."""
    supervisor = _running()
    for task in (W1, W0):
        assert supervisor.exited(task, 0, 5.0) == []
    assert supervisor.exited(CHIEF, -9, 6.0) == [Start(CHIEF)]
    supervisor.answered(14.0)
    assert supervisor.exited(PS, 0, 20.0) == []
    assert supervisor.exited(CHIEF, 0, 21.0) == [Finish(0)] and supervisor.failure is None
    supervisor = _running()
    for task in (W1, W0):
        supervisor.exited(task, 0, 5.0)
    supervisor.exited(CHIEF, 1, 6.0)
    assert supervisor.failure is not None and supervisor.failure.task == CHIEF


def test_an_evaluator_takes_its_time_for_the_last_checkpoint() -> None:
    supervisor = Supervisor([W0], [CHIEF, PS, EVALUATOR], POLICY)
    supervisor.begin(0.0)
    assert supervisor.listening(CHIEF) == [Start(PS), Start(EVALUATOR), Start(W0)]
    assert supervisor.exited(W0, 0, 5.0) == []
    for now in (15.0, 25.0, 35.0):
        assert supervisor.ticked(now) == [Say("evaluator:0 is still running; waiting for it, Ctrl-C ends it")]
        assert _deadline(supervisor) == now + 10.0
    assert supervisor.exited(EVALUATOR, 0, 36.0) == []
    # The others do not: they have until the deadline.
    assert supervisor.ticked(45.0) == [Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.failure is not None and "ps:0" in supervisor.failure.reason


def test_an_evaluator_that_was_started_again_takes_its_time_too() -> None:
    """It makes no steps: it was killed, and the job had failed."""
    supervisor = Supervisor([W0], [CHIEF, EVALUATOR], POLICY)
    supervisor.begin(0.0)
    supervisor.listening(CHIEF)
    assert supervisor.exited(EVALUATOR, -signal.SIGKILL, 1.0) == [Start(EVALUATOR)]
    supervisor.exited(W0, 0, 2.0)
    assert supervisor.exited(EVALUATOR, -signal.SIGKILL, 2.5) == [Start(EVALUATOR)]
    assert supervisor.exited(CHIEF, 0, 3.0) == [] and supervisor.ticked(3.0 + LATE_S) == []
    assert supervisor.exited(EVALUATOR, 0, 30.0) == [Finish(0)]


def test_an_evaluator_that_fails_ends_no_training() -> None:
    supervisor = Supervisor([W0], [CHIEF, PS, EVALUATOR], POLICY)
    supervisor.begin(0.0)
    supervisor.listening(CHIEF)
    assert supervisor.exited(EVALUATOR, 1, 5.0) == []
    assert supervisor.phase is Phase.RUNNING and supervisor.failure is not None
    assert (supervisor.failure.task, supervisor.failure.reason) == (EVALUATOR, "training continues without it")
    assert supervisor.exited(W0, 0, 6.0) == supervisor.exited(CHIEF, 0, 7.0) == []
    assert supervisor.exited(PS, 0, 7.1) == [Finish(1)]


@pytest.mark.parametrize("code", [2, 42])
def test_an_evaluator_that_can_never_work_ends_the_job(code: int) -> None:
    supervisor = Supervisor([W0], [CHIEF, PS, EVALUATOR], POLICY)
    supervisor.begin(0.0)
    supervisor.listening(CHIEF)
    assert supervisor.exited(EVALUATOR, code, 5.0) != [] and supervisor.phase is Phase.ENDING


def test_a_failure_that_ends_the_job_counts_before_an_evaluators() -> None:
    supervisor = Supervisor([W0], [CHIEF, PS, EVALUATOR], POLICY)
    supervisor.begin(0.0)
    supervisor.listening(CHIEF)
    supervisor.exited(EVALUATOR, 1, 5.0)
    supervisor.exited(W0, 42, 6.0)
    assert supervisor.failure is not None and (supervisor.failure.task, supervisor.failure.code) == (W0, 42)


def test_servers_may_end_before_the_last_worker_is_gone() -> None:
    supervisor = _running()
    for task in (W1, PS, CHIEF):
        assert supervisor.exited(task, 0, 1.0) == []
    assert supervisor.exited(W0, 0, 2.0) == [Finish(0)]


def test_nobody_starts_before_the_chief_listens_and_only_once() -> None:
    supervisor = _running()
    assert supervisor.listening(CHIEF) == []
    assert supervisor.listening(PS) == []


def test_a_script_alone() -> None:
    assert _alone().exited(W0, 0, 1.0) == [Finish(0)]
    supervisor = _alone()
    assert supervisor.exited(W0, 5, 1.0) == [Start(W0)]
    supervisor = _alone()
    assert supervisor.exited(W0, 1, 1.0) == [Finish(1)]
    assert supervisor.failure is not None and supervisor.failure.reason == "it failed before its first step"


def test_a_script_alone_that_fails_after_a_step_is_started_again_if_it_goes_on_where_it_was() -> None:
    supervisor = _alone()
    supervisor.stepped([W0])
    assert supervisor.exited(W0, 1, 1.0) == [Finish(1)]
    assert supervisor.failure is not None and "its script would start from scratch" in supervisor.failure.reason
    supervisor = _alone()
    supervisor.stepped([W0])
    supervisor.resumes = True
    assert supervisor.exited(W0, 1, 1.0) == [Start(W0)]


@pytest.mark.parametrize("task", [CHIEF, PS, W0])
@pytest.mark.parametrize("code", [-signal.SIGKILL, 3, 143])
def test_a_task_that_dies_is_started_again(task: TaskId, code: int) -> None:
    supervisor = _running()
    assert supervisor.exited(task, code, 1.0) == [Start(task)]
    assert supervisor.restarts == {task: 1}
    assert supervisor.exits[task] == [code]
    assert supervisor.failure is None


@pytest.mark.parametrize("code", [2, 42])
def test_codes_that_are_never_retried(code: int) -> None:
    supervisor = _running()
    supervisor.stepped([W0])
    actions = supervisor.exited(W0, code, 1.0)
    assert actions == [Signal(task, signal.SIGTERM) for task in (W1, CHIEF)]
    assert supervisor.failure is not None
    assert supervisor.failure.reason == f"exit code {code} is never retried"


def test_code_1_is_retried_only_after_a_step_of_this_life() -> None:
    supervisor = _running()
    supervisor.stepped([W0, W1])
    assert supervisor.exited(W0, 1, 1.0) == [Start(W0)]
    assert supervisor.exited(W1, 1, 1.0) == [Start(W1)]
    assert Start(W0) not in supervisor.exited(W0, 1, 2.0)
    assert supervisor.failure is not None and supervisor.failure.reason == "it failed before its first step"


def test_a_restarted_worker_may_fail_before_its_first_step_while_others_train() -> None:
    """They had taken all batches of the epoch, and its script printed the loss after the loop: the job ended."""
    supervisor = _running()
    supervisor.stepped([W0, W1])
    for at_s in (1.0, 2.0):
        assert supervisor.exited(W0, 1, at_s) == [Start(W0)]
    assert Start(W0) not in supervisor.exited(W0, 1, 3.0)
    assert supervisor.failure is not None and "no restarts are left" in supervisor.failure.reason


def test_a_ps_that_stood_still_before_the_first_step_is_started_again() -> None:
    """It ends with code 1, as the chief has taken it for lost: that ended the job."""
    supervisor = _running()
    supervisor.away([PS], 4.0)
    assert supervisor.exited(PS, 1, 5.0) == [Start(PS)]
    assert Start(PS) not in supervisor.exited(PS, 1, 6.0)


def test_steps_of_tasks_that_do_not_run_are_ignored() -> None:
    supervisor = _running()
    supervisor.stepped([TaskId("worker", 7)])
    supervisor.exited(W0, 0, 0.5)
    supervisor.stepped([W0])
    assert supervisor.exited(W1, 1, 1.0)[0] == Signal(CHIEF, signal.SIGTERM)


def test_a_chief_that_ends_with_1_has_stopped_the_job() -> None:
    supervisor = _running()
    supervisor.stepped([CHIEF])
    supervisor.exited(CHIEF, 1, 1.0)
    assert supervisor.failure is not None and supervisor.failure.reason == "the chief stopped the job"


def test_nothing_is_restarted_after_the_chief_ended_the_job() -> None:
    supervisor = _running()
    supervisor.exited(CHIEF, 0, 1.0)
    assert Start(W0) not in supervisor.exited(W0, -signal.SIGSEGV, 1.0)
    assert supervisor.failure is not None and "already ended" in supervisor.failure.reason


def test_a_worker_that_is_killed_after_the_chief_ended_the_job_had_finished() -> None:
    supervisor = _running()
    supervisor.exited(CHIEF, 0, 1.0)
    supervisor.exited(PS, 0, 1.0)
    supervisor.exited(W0, 0, 1.0)
    assert supervisor.exited(W1, -signal.SIGKILL, 1.0) == [Finish(0)]


def test_a_worker_that_is_killed_after_its_goodbye_does_not_wait_for_a_chief_that_ended() -> None:
    supervisor = _running()
    assert supervisor.exited(W1, -signal.SIGKILL, 1.0) == [Start(W1)]
    assert Kill(W1) not in supervisor.exited(CHIEF, 0, 1.0)  # it may be about to end by itself
    supervisor.exited(PS, 0, 1.0)
    supervisor.exited(W0, 0, 1.0)
    assert _deadline(supervisor) == 1.0 + LATE_S and supervisor.ticked(0.9 + LATE_S) == []
    assert supervisor.ticked(1.0 + LATE_S) == [Kill(W1)]
    assert supervisor.exited(W1, -signal.SIGKILL, 1.0 + LATE_S) == [Finish(0)]


def test_a_worker_that_was_started_again_and_has_finished_ends_by_itself() -> None:
    supervisor = _running()
    assert supervisor.exited(W1, -signal.SIGKILL, 1.0) == [Start(W1)]
    for task in (CHIEF, PS, W0):
        assert Kill(W1) not in supervisor.exited(task, 0, 2.0)
    assert supervisor.exited(W1, 0, 2.1) == [Finish(0)]


def test_restarts_are_counted_over_all_tasks() -> None:
    supervisor = _running()
    assert supervisor.exited(PS, -9, 1.0) == [Start(PS)]
    assert supervisor.exited(W0, -9, 1.0) == [Start(W0)]
    assert Start(W1) not in supervisor.exited(W1, -9, 1.0)
    assert supervisor.failure is not None
    assert (supervisor.failure.task, supervisor.failure.code) == (W1, -9)
    assert supervisor.failure.reason == "no restarts are left (--max-restarts 2)"


@pytest.mark.parametrize(("code", "finish"), [(42, 42), (2, 2), (-9, 1)])
def test_exit_code_is_that_of_the_first_failure(code: int, finish: int) -> None:
    supervisor = _running(dataclasses.replace(POLICY, max_restarts=0))
    supervisor.exited(W1, code, 1.0)
    assert supervisor.exited(W0, 7, 1.1) == []
    assert supervisor.exited(CHIEF, 1, 1.2) == [Signal(PS, signal.SIGTERM)]
    assert supervisor.exited(PS, -15, 1.3) == [Finish(finish)]
    assert supervisor.failure is not None and supervisor.failure.task == W1
    assert supervisor.exits == {CHIEF: [1], PS: [-15], W0: [7], W1: [code]}


def test_who_does_not_end_after_a_failure_is_killed() -> None:
    supervisor = _running()
    supervisor.exited(W0, 42, 1.0)
    assert _deadline(supervisor) == 5.0
    assert supervisor.ticked(4.9) == []
    assert supervisor.ticked(5.0) == [Kill(W1), Kill(PS), Kill(CHIEF)]
    assert supervisor.ticked(99.0) == []


def test_servers_that_stay_after_the_workers_are_a_failure() -> None:
    supervisor = _running()
    supervisor.exited(W0, 0, 1.0)
    supervisor.exited(W1, 0, 1.0)
    supervisor.exited(PS, 0, 1.0)
    assert supervisor.ticked(11.0) == [Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.failure is not None and supervisor.failure.reason.endswith("the workers were done: chief:0")
    assert supervisor.exited(CHIEF, -15, 12.0) == [Finish(1)]


def test_a_server_that_fails_after_the_workers_is_named() -> None:
    supervisor = _running(dataclasses.replace(POLICY, max_restarts=0))
    supervisor.exited(W0, 0, 1.0)
    supervisor.exited(W1, 0, 1.0)
    supervisor.exited(PS, -11, 1.0)
    assert supervisor.exited(CHIEF, 0, 1.0) == [Finish(1)]
    assert supervisor.failure is not None and supervisor.failure.task == PS


def test_a_chief_that_never_listens() -> None:
    supervisor = Supervisor([W0], [CHIEF, PS], POLICY)
    supervisor.begin(0.0)
    assert supervisor.ticked(29.0) == []
    assert supervisor.ticked(30.0) == [Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.exited(CHIEF, -15, 30.1) == [Finish(1)]
    assert supervisor.failure is not None and "within 30 s" in supervisor.failure.reason


@pytest.mark.parametrize(("code", "finish"), [(0, 1), (2, 2)])
def test_a_chief_that_ends_before_it_listens(code: int, finish: int) -> None:
    supervisor = Supervisor([W0], [CHIEF, PS], POLICY)
    supervisor.begin(0.0)
    assert supervisor.exited(CHIEF, code, 1.0) == [Finish(finish)]


@pytest.mark.parametrize(("signum", "finish"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_forwarded_and_the_second_kills(signum: int, finish: int) -> None:
    supervisor = _running()
    assert supervisor.interrupted(signum, 1.0) == [Signal(task, signum) for task in (W0, W1, CHIEF)]
    assert supervisor.exited(W0, -signum, 1.1) == []
    assert supervisor.interrupted(signum, 1.2) == [Kill(W1), Kill(PS), Kill(CHIEF)]
    assert supervisor.exited(W1, -9, 1.3) == []
    assert supervisor.exited(PS, -9, 1.3) == []
    assert supervisor.exited(CHIEF, -9, 1.3) == [Finish(finish)]
    assert supervisor.failure is None


@pytest.mark.parametrize(("code", "finish"), [(143, 130), (1, 1)])
def test_a_job_that_is_interrupted_and_not_saved_has_failed(code: int, finish: int) -> None:
    supervisor = _running()
    supervisor.interrupted(signal.SIGINT, 1.0)
    for task in (W0, W1, CHIEF):
        supervisor.exited(task, code if task == CHIEF else 143, 1.1)
    assert supervisor.exited(PS, 143, 1.2) == [Finish(finish)]


def test_a_terminal_that_closes_ends_a_job_as_sigterm_does_and_may_say_so_twice() -> None:
    supervisor = _running()
    assert supervisor.interrupted(signal.SIGHUP, 1.0) == [Signal(task, signal.SIGTERM) for task in (W0, W1, CHIEF)]
    assert supervisor.interrupted(signal.SIGHUP, 1.1) == []
    assert supervisor.interrupted(signal.SIGINT, 1.2) == [Kill(task) for task in (W0, W1, PS, CHIEF)]


def test_sigquit_kills_at_once() -> None:
    supervisor = _running()
    assert supervisor.interrupted(signal.SIGQUIT, 1.0) == [Kill(task) for task in (W0, W1, PS, CHIEF)]
    for task in (W0, W1, PS):
        assert supervisor.exited(task, -9, 1.1) == []
    assert supervisor.exited(CHIEF, -9, 1.1) == [Finish(131)]


def test_the_ps_are_told_after_the_chief_has_ended() -> None:
    supervisor = _running()
    supervisor.interrupted(signal.SIGINT, 1.0)
    assert supervisor.exited(W0, 130, 1.1) == []
    assert supervisor.exited(CHIEF, 143, 1.2) == [Signal(PS, signal.SIGINT)]
    supervisor = _running()
    assert supervisor.exited(CHIEF, 42, 1.0) == [Signal(task, signal.SIGTERM) for task in (W0, W1, PS)]


def test_after_an_interrupt_the_timeout_kills() -> None:
    supervisor = _running()
    supervisor.interrupted(signal.SIGTERM, 1.0)
    assert supervisor.ticked(10.9) == []
    assert supervisor.ticked(11.0) == [Kill(W0), Kill(W1), Kill(PS), Kill(CHIEF)]


def test_an_interrupt_does_not_prolong_a_failure() -> None:
    supervisor = _running()
    supervisor.exited(W0, 42, 1.0)
    supervisor.interrupted(signal.SIGINT, 2.0)
    assert _deadline(supervisor) == 5.0


RING = dataclasses.replace(POLICY, restart_workers=False)


def _ring(resumes: bool = True) -> Supervisor:
    supervisor = Supervisor([W0, W1], [CHIEF], RING)
    assert supervisor.begin(0.0) == [Start(CHIEF)]
    assert supervisor.listening(CHIEF) == [Start(W0), Start(W1)]
    if resumes:
        supervisor.resumes = True
    return supervisor


@pytest.mark.parametrize("code", [143, -9])
def test_a_ring_whose_script_goes_on_is_started_again_as_a_whole(code: int) -> None:
    supervisor = _ring()
    assert supervisor.exited(W1, code, 1.0) == []  # the other one may be saving: it is let be
    assert (supervisor.phase, _deadline(supervisor)) == (Phase.RENEWING, 11.0)
    assert supervisor.exited(W0, 1, 2.0) == [Signal(CHIEF, signal.SIGTERM)]
    assert _deadline(supervisor) == 6.0
    assert supervisor.exited(CHIEF, 143, 3.0) == [Renew(), Start(CHIEF)]
    assert supervisor.phase is Phase.STARTING
    assert supervisor.listening(CHIEF) == [Start(W0), Start(W1)]
    assert (supervisor.restarts, supervisor.life) == ({W1: 1}, 2)
    assert supervisor.exited(W0, 0, 4.0) == supervisor.exited(W1, 0, 4.0) == []
    assert supervisor.exited(CHIEF, 0, 5.0) == [Finish(0)]
    assert supervisor.failure is None


def test_a_ring_whose_script_does_not_go_on_has_failed() -> None:
    supervisor = _ring(resumes=False)
    assert supervisor.exited(W1, 143, 1.0) == [Signal(W0, signal.SIGTERM), Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.failure is not None and "torch.distributed, cannot lose a worker" in supervisor.failure.reason
    assert "sg.PreemptionCheckpointHandler" in supervisor.failure.reason


def test_a_ring_is_not_started_again_when_a_worker_has_finished() -> None:
    supervisor = _ring()
    supervisor.exited(W0, 0, 1.0)
    assert supervisor.exited(W1, -9, 1.0) == [Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.failure is not None and "have finished" in supervisor.failure.reason


def test_a_ring_is_started_again_as_often_as_allowed() -> None:
    supervisor = _ring()
    for _ in range(RING.max_restarts):
        supervisor.exited(W0, 143, 1.0)
        supervisor.exited(W1, 143, 1.0)
        assert supervisor.exited(CHIEF, 143, 1.0) == [Renew(), Start(CHIEF)]
        supervisor.listening(CHIEF)
    supervisor.exited(W0, 143, 1.0)
    assert supervisor.failure is not None and supervisor.failure.reason == "no restarts are left (--max-restarts 2)"


def test_a_worker_that_does_not_leave_a_broken_ring_is_killed() -> None:
    supervisor = _ring()
    supervisor.exited(W1, -9, 1.0)
    assert supervisor.ticked(10.9) == []
    assert supervisor.ticked(11.0) == [Kill(W0), Kill(CHIEF)]
    assert supervisor.exited(CHIEF, -9, 11.1) == []
    assert supervisor.exited(W0, -9, 11.2) == [Renew(), Start(CHIEF)]


@pytest.mark.parametrize("code", [143, -9])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_chief_that_leaves_its_ring_is_started_again_alone(code: int, resumes: bool) -> None:
    supervisor = _ring(resumes=resumes)
    assert supervisor.exited(CHIEF, code, 1.0) == [Start(CHIEF)]  # the workers have not noticed
    assert (supervisor.restarts, supervisor.life) == ({CHIEF: 1}, 1)


def test_a_chief_that_leaves_a_broken_ring_first() -> None:
    supervisor = _ring()
    supervisor.exited(W1, 143, 1.0)
    assert supervisor.exited(CHIEF, 143, 1.1) == []
    assert supervisor.exited(W0, 143, 1.2) == [Renew(), Start(CHIEF)]


def test_what_is_never_retried_ends_a_broken_ring() -> None:
    supervisor = _ring()
    supervisor.exited(W1, 143, 1.0)
    assert supervisor.exited(W0, 2, 1.1) == [Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.exited(CHIEF, 143, 1.2) == [Finish(2)]


def test_an_interrupt_reaches_the_chief_of_a_ring_when_the_workers_have_saved() -> None:
    supervisor = _ring()
    assert supervisor.interrupted(signal.SIGTERM, 1.0) == [Signal(W0, signal.SIGTERM), Signal(W1, signal.SIGTERM)]
    assert supervisor.exited(W1, 143, 2.0) == []
    assert supervisor.exited(W0, 143, 2.1) == [Signal(CHIEF, signal.SIGTERM)]
    assert supervisor.exited(CHIEF, 143, 2.2) == [Finish(143)]
    assert supervisor.failure is None and supervisor.num_restarts == 0


def test_an_interrupt_ends_a_job_that_is_about_to_start_again() -> None:
    supervisor = _ring()
    supervisor.exited(W1, 143, 1.0)
    assert supervisor.interrupted(signal.SIGINT, 1.1) == [Signal(W0, signal.SIGINT)]
    assert supervisor.exited(W0, 143, 1.2) == [Signal(CHIEF, signal.SIGINT)]
    assert supervisor.exited(CHIEF, 143, 1.3) == [Finish(130)]


def test_words_for_exits() -> None:
    assert [describe_exit(code) for code in (1, -9, -200)] == [
        "exit code 1",
        "killed by SIGKILL",
        "killed by signal 200",
    ]


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: no action on a task that does not run, and the job ends."""

    policy = POLICY
    servers: tuple[TaskId, ...] = (CHIEF, PS)

    def __init__(self) -> None:
        super().__init__()
        self.supervisor = Supervisor([W0, W1], self.servers, self.policy)
        self.alive: set[TaskId] = set()
        self.finished: list[int] = []
        self.now = 0.0
        self.take(self.supervisor.begin(0.0))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(task):
                    assert task not in self.alive
                    self.alive.add(task)
                case Signal(task, _) | Kill(task):
                    assert task in self.alive
                case Renew():
                    assert not self.alive
                case Finish(code):
                    assert not self.alive
                    self.finished.append(code)

    @rule()
    def chief_listens(self) -> None:
        if CHIEF in self.alive:
            self.take(self.supervisor.listening(CHIEF))

    @rule()
    def script_goes_on(self) -> None:
        self.supervisor.resumes = True

    @rule(tasks=st.sets(st.sampled_from([CHIEF, PS, W0, W1])))
    def steps(self, tasks: set[TaskId]) -> None:
        self.supervisor.stepped(tasks)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 0, 1, 2, 42, 143, -9]))
    def exits(self, data: st.DataObject, code: int) -> None:
        task = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(task)
        self.take(self.supervisor.exited(task, code, self.now))

    @precondition(lambda self: not self.finished)
    @rule(signum=st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]))
    def interrupt(self, signum: int) -> None:
        self.take(self.supervisor.interrupted(signum, self.now))

    @rule(seconds=st.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.supervisor.ticked(self.now))

    @invariant()
    def finishes_exactly_when_nobody_is_left(self) -> None:
        assert len(self.finished) <= 1
        assert bool(self.finished) == (self.supervisor.phase is Phase.OVER)
        assert self.alive == self.supervisor.running
        assert bool(self.finished) == (not self.alive)
        assert self.supervisor.num_restarts <= POLICY.max_restarts


class AnyOrderInARing(AnyOrder):
    """The same, where a worker that dies takes all others along."""

    policy = RING
    servers = (CHIEF,)


AnyOrder.TestCase.settings = settings(max_examples=100, deadline=None)
AnyOrderInARing.TestCase.settings = settings(max_examples=100, deadline=None)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrderInARing = AnyOrderInARing.TestCase


@given(st.integers(0, 5))
def test_no_more_lives_than_allowed(max_restarts: int) -> None:
    supervisor = _running(dataclasses.replace(POLICY, max_restarts=max_restarts))
    lives = 1
    while supervisor.exited(W0, -9, 1.0) == [Start(W0)]:
        lives += 1
    assert lives == max_restarts + 1


def _shrinking(num_workers: int = 3, max_restarts: int = 0) -> Supervisor:
    workers = [TaskId("worker", index) for index in range(num_workers)]
    supervisor = Supervisor(workers, [CHIEF], dataclasses.replace(RING, min_workers=2, max_restarts=max_restarts))
    supervisor.begin(0.0)
    supervisor.listening(CHIEF)
    return supervisor


def test_a_ring_goes_on_with_those_who_are_left_and_ends_well() -> None:
    supervisor = _shrinking()
    supervisor.was_complete = True
    assert supervisor.exited(W1, -9, 1.0) == []
    assert supervisor.lost == {W1} and supervisor.num_restarts == 0
    supervisor.exited(W0, 0, 2.0)
    supervisor.exited(TaskId("worker", 2), 0, 2.0)
    assert supervisor.phase is Phase.DRAINING
    assert supervisor.exited(CHIEF, 0, 3.0) == [Finish(0)]


def test_a_worker_of_such_a_ring_comes_back_as_long_as_restarts_are_left_and_it_trains() -> None:
    supervisor = _shrinking(max_restarts=2)
    supervisor.was_complete = True
    assert supervisor.exited(W1, -9, 1.0) == [Start(W1)]
    assert not supervisor.lost and supervisor.restarts == {W1: 1}
    assert supervisor.exited(W1, 2, 2.0) == [], "a newcomer that cannot join harms nobody"
    assert supervisor.lost == {W1} and supervisor.failure is None
    supervisor = _shrinking(max_restarts=2)
    supervisor.was_complete = True
    for _ in range(2):
        supervisor.exited(W1, -9, 1.0)
    assert supervisor.exited(W1, -9, 1.0) == [] and supervisor.lost == {W1}
    supervisor = _shrinking(max_restarts=2)
    supervisor.was_complete = True
    supervisor.exited(W0, 0, 1.0)
    assert supervisor.exited(W1, -9, 1.0) == [], "the others end"


def test_a_worker_of_such_a_ring_that_is_told_to_end_ends_alone_unless_all_save_together() -> None:
    supervisor = _shrinking(max_restarts=3)
    supervisor.was_complete = True
    assert supervisor.exited(W1, 143, 1.0) == [Start(W1)]
    supervisor.resumes = True
    supervisor.exited(W1, 143, 2.0)
    assert supervisor.phase is Phase.RENEWING


def test_such_a_ring_begins_anew_where_a_worker_that_came_later_cannot_join_and_is_needed() -> None:
    """As in `fit`, which takes nobody in: that ends with exit code 2."""
    supervisor = _shrinking(max_restarts=4)
    supervisor.resumes = True
    supervisor.was_complete = True
    for worker in (W0, W1):
        assert supervisor.exited(worker, -9, 1.0) == [Start(worker)]
    supervisor.exited(W0, 2, 2.0)
    supervisor.exited(W1, 2, 2.0)
    assert supervisor.phase is Phase.RENEWING and supervisor.failure is None


def test_a_ring_with_too_few_left_or_not_complete_yet_has_failed() -> None:
    supervisor = _shrinking(2)
    supervisor.was_complete = True
    supervisor.exited(W1, -9, 1.0)
    assert supervisor.failure is not None
    assert supervisor.failure.reason.startswith("fewer than --min-workers 2 are left; start")
    early = _shrinking()
    early.exited(W1, -9, 1.0)
    assert early.failure is not None and early.lost == set()
    assert early.failure.reason.startswith("--min-workers is for a ring that has formed; torch.distributed forms none")


def test_a_ring_that_the_chief_has_ended_starts_none_of_its_workers_again() -> None:
    supervisor = _shrinking(max_restarts=3)
    supervisor.was_complete = True
    assert supervisor.exited(W1, -9, 1.0) == [Start(W1)]
    supervisor.broken()
    supervisor.exited(W0, 1, 2.0)
    assert supervisor.failure is not None
    assert supervisor.failure.reason == "fewer than --min-workers 2 are left; start the job again"
    parameter_servers = _running()
    parameter_servers.broken()
    parameter_servers.stepped([W0])
    assert parameter_servers.exited(W0, 1, 1.0) == [Start(W0)], "that is for the chief to say"


def test_such_a_ring_that_is_told_to_end_ends_as_one_without_min_workers_does() -> None:
    """Its chief ends with 1, as too few are left; 143 asks for a restart."""
    supervisor = _shrinking(num_workers=2)
    supervisor.was_complete = True
    supervisor.interrupted(signal.SIGTERM, 1.0)
    for worker in (W0, W1):
        supervisor.exited(worker, 143, 2.0)
    assert supervisor.exited(CHIEF, 1, 3.0) == [Finish(143)]


def test_such_a_ring_of_which_each_worker_was_told_to_end_does_not_start_from_scratch() -> None:
    supervisor = _shrinking(max_restarts=3)
    supervisor.was_complete = True
    supervisor.broken()
    supervisor.exited(CHIEF, 143, 2.0)
    assert supervisor.failure is not None and supervisor.failure.reason == "the chief stopped the job"


@pytest.mark.parametrize("code", [1, 143])
@pytest.mark.parametrize("first", [W1, CHIEF], ids=str)
def test_such_a_ring_begins_anew_if_its_script_goes_on_where_it_was(first: TaskId, code: int) -> None:
    supervisor = _shrinking(max_restarts=3)
    supervisor.resumes = True
    supervisor.was_complete = True
    assert supervisor.exited(W1, -9, 1.0) == [Start(W1)]
    supervisor.broken()
    assert supervisor.exited(first, 1, 2.0)[:1] == ([Signal(W0, signal.SIGTERM)] if first == CHIEF else [])
    assert supervisor.phase is Phase.RENEWING and supervisor.num_restarts == 2
    for worker in supervisor.running & set(supervisor.workers):
        actions = supervisor.exited(worker, 1, 3.0)
    if first != CHIEF:
        actions = supervisor.exited(CHIEF, 1, 4.0)
    assert actions == [Renew(), Start(CHIEF)]


def test_a_worker_that_must_not_be_retried_ends_a_ring_whoever_is_left() -> None:
    supervisor = _shrinking()
    supervisor.was_complete = True
    supervisor.exited(W1, 2, 1.0)
    assert supervisor.failure is not None and supervisor.failure.code == 2


def test_a_ps_that_ends_because_it_was_not_wanted_may_be_wanted_again_before_the_launcher_hears_of_either() -> None:
    supervisor = _running()
    p1 = TaskId("ps", 1)
    assert supervisor.want("ps", 2) == [Start(p1)]
    assert supervisor.want("ps", 2, [p1]) == [], "it is on its way"
    assert supervisor.exited(p1, 0, 1.0) == []
    assert supervisor.want("ps", 2) == [], "its chief has it still: the job may be over"
    assert supervisor.want("ps", 2, [p1]) == [Start(p1)]
    assert supervisor.want("ps", 1, [p1]) == []
    assert supervisor.want("ps", 2, [p1]) == [], "it has been told to end, and has not yet"
    assert supervisor.exited(p1, 0, 2.0) == []
    assert supervisor.want("ps", 2, [p1]) == [Start(p1)]


def test_tasks_that_are_wanted_when_the_job_is_as_good_as_over_are_not_waited_for() -> None:
    supervisor = _running()
    w2, p1 = TaskId("worker", 2), TaskId("ps", 1)
    assert supervisor.want("worker", 3) == [Start(w2)] and supervisor.want("ps", 2) == [Start(p1)]
    for task in (W0, W1, PS, CHIEF):
        assert supervisor.exited(task, 0, 1.0) == []
    assert supervisor.ticked(1.0 + LATE_S) == [Kill(w2), Kill(p1)]
    assert supervisor.exited(p1, -9, 5.0) == []
    assert supervisor.exited(w2, -9, 5.0) == [Finish(0)]


def test_tasks_that_are_wanted_are_started_and_those_that_are_not_may_end_as_they_like() -> None:
    supervisor = _running()
    w2 = TaskId("worker", 2)
    assert supervisor.want("worker", 3) == [Start(w2)]
    assert supervisor.want("worker", 3) == []
    assert supervisor.want("worker", 1) == []
    assert supervisor.exited(w2, 0, 1.0) == []
    assert supervisor.exited(W1, 1, 1.0) == [], "no failure: it was told to end"
    assert supervisor.want("worker", 2) == [Start(W1)]
    assert supervisor.want("ps", 2) == [Start(TaskId("ps", 1))]
    assert supervisor.exited(W1, -9, 2.0) == [Start(W1)], "it is wanted now"
    assert supervisor.exited(W0, 0, 3.0) == []
    assert supervisor.want("worker", 1) == []
    assert supervisor.exited(W1, 0, 4.0) == []
    assert supervisor.phase is Phase.DRAINING
    assert supervisor.want("worker", 2) == [], "the job ends"
