"""Rare states, and how they are recognised: proof that worlds come to the places where errors hide.

Most leave their mark in history: what was begun under one epoch and ended under a later one has lived through the end
of a process. The rest is seen as it happens, by the world's hooks. Nothing here finds fault with anything, and nothing
here may change what happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from understudy.model.definition import Definition, decode_definition
from understudy.model.errors import Fenced
from understudy.model.kinds import Fork, Join
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.plugins import Checker, checker, probes
from understudy.simulations.tales import Tale
from understudy.store.commit import Commit

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World
    from understudy.store.writer import Change, Written

MANY: Final = 8  # Commits in one batch.

probes(
    attempt_lost="the process ended while an attempt was out, and the next number went out",
    batch_of_many_commits=f"{MANY} commits or more were written as one statement",
    cancel_while_compensating="a cancel came while a failed saga was being undone",
    cancelled_while_paused="a paused instance was cancelled",
    clock_went_back_over_a_timer="a timer had fired, and the clock went back to before it was due",
    commit_unknown_and_landed="nobody knew whether a commit had landed; it had, and the owner lived on",
    delivered_again="a subscriber was told a second time of what it had taken",
    degraded_and_reopened="the writer lost its connection and got a new one",
    duplicate_request_answered_from_record="a second call under one key got the first one's answer",
    fenced_owner_woke="an owner that another had replaced woke up, and was refused",
    handler_overran="an attempt was ended by its timeout",
    incident_across_restart="an incident was raised in one life and settled in another",
    incident_resolved_by_fail="an operator failed a step at its incident",
    incident_resolved_by_retry="an operator retried a step at its incident",
    incident_resolved_by_skip="an operator skipped a step at its incident",
    join_after_crash="a join fired in another life than the one in which its first token came",
    late_result_refused="a handler was at work when its attempt was withdrawn: what it gave came too late",
    loop_round_two_join="a join fired again, in a later round",
    message_before_wait="a message that was sent before its wait was used",
    message_expired="a message was passed over because its time had run out",
    message_matched_again="a published message lost its wait and was given to another",
    message_taken_after_restart="a published message was matched in one life and used in another",
    nested_join_fired="a join inside the branch of another fork fired",
    old_version_went_on="an instance went on under an old definition when a newer one was in use",
    pause_with_task_out="a pause came while a handler was at work",
    paused_across_restart="an instance was paused in one life and resumed in another",
    passivated_and_reactivated="an instance left memory and came back in the same life",
    result_not_storable="a handler gave what cannot be stored",
    saga_in_saga_undone="the failure of an inner saga undid the one around it",
    start_repeated_same_answer="a second start of one id was told that it is there",
    subscriber_held_and_released="a delivery failed, held its instance back, and was taken later",
    subscriber_needed_an_operator="a delivery failed so often that only an operator could have it tried again",
    surplus_token_left_for_next_round="a join fired and left a token for its next round",
    task_done_while_paused="a handler finished while its instance was paused",
    terminated_with_task_out="an instance was terminated while a handler was at work",
    third_lost_attempt_incident="three attempts in a row ended with their process, and an operator was asked",
    timer_fired_after_restart="a timer was set in one life and fired in another",
    took_over_from_a_hung_owner="an owner stood still beyond its lease, and another took over",
    transactional_result_found_after_crash="a transactional task was done before a crash and found done after it",
    two_commands_in_one_commit="two commands or more were decided into one commit",
    two_incidents_at_once="an instance had two open incidents",
    undo_across_crash="a saga was undone partly in one life and partly in another",
    undo_failed_incident="an undo failed for good, and an operator was asked",
    undo_interrupted_by_crash="the process ended while an undo was out",
    wait_timed_out="a wait for a message went the late way",
)


@checker
class Probed(Checker):
    """Never finds anything wrong."""

    id = "probes"
    statement = "rare states were reached"

    def watch(self, world: World) -> None:
        Evidence.of(world)
        self._world = world
        self._active: dict[str, tuple[int, int, int]] = {}  # Epoch, activation and moment of the last commit.
        self._matched: dict[int, tuple[str, int]] = {}
        world.on_landed.append(self._on_landed)
        world.on_written.append(self._on_written)
        world.on_lost.append(self._on_lost)

    def _on_landed(self, life: Life, commit: Commit, _version: int) -> None:
        now_ms = self._world.time.now_ms
        epoch, activation, at_ms = self._active.get(commit.id, (0, 0, 0))
        if epoch == life.epoch and activation != commit.activation and now_ms - at_ms >= life.node.limits.idle_ms:
            self._world.probe("passivated_and_reactivated")
        self._active[commit.id] = (life.epoch, commit.activation, now_ms)

    def _on_written(self, _life: Life, changes: Sequence[Change], written: Written) -> None:
        if len(changes) >= MANY:
            self._world.probe("batch_of_many_commits")
        for delivery in written.deliveries:
            place = (delivery.instance, delivery.wait)
            if self._matched.setdefault(delivery.message, place) != place:
                self._matched[delivery.message] = place
                self._world.probe("message_matched_again")

    def _on_lost(self, life: Life) -> None:
        if isinstance(life.system.services.lost, Fenced):
            self._world.probe("fenced_owner_woke")

    def find(self, world: World) -> Iterable[str]:
        look(world)
        return ()


def look(world: World) -> None:
    """Recognise in a world that has come to rest what it has been through."""
    evidence = Evidence.of(world)
    bodies = world.peek("SELECT no, body FROM definition ORDER BY no")
    nested = {no: _nested_joins(decode_definition(body)) for no, body in bodies}
    tales = [Tale(rows, nested) for rows in evidence.histories.values()]
    _old_versions(tales)
    for tale in tales:
        for name, count in sorted(tale.found.items()):
            for _ in range(min(count, 3)):  # One is proof; a loop of ten thousand rounds needs no more.
                world.probe(name)
    _look_at_commits(world, evidence)
    _look_at_operations(world, {key for tale in tales for key in tale.keys})
    _look_at_ledger(world, tales)
    _look_at_subscribers(world)


def _look_at_commits(world: World, evidence: Evidence) -> None:
    """A commit that nobody was told of was the last one of its life, or its writer has gone on after all."""
    told = {report.digest for report in evidence.reports}
    last = {row.epoch: row.seq for row in evidence.rows}
    for row in evidence.rows:
        if row.digest not in told and row.seq != last[row.epoch]:
            world.probe("commit_unknown_and_landed")


def _nested_joins(definition: Definition) -> frozenset[str]:
    """The joins that lie between another fork and its own join."""
    onward: dict[str, list[str]] = {}
    for edge in definition.edges:
        onward.setdefault(edge.source, []).append(edge.target)
    joins = {node.id for node in definition.nodes if isinstance(node, Join)}
    nested: set[str] = set()
    for fork in (node.id for node in definition.nodes if isinstance(node, Fork)):
        own = fork.replace("fork", "join")
        seen = {fork, own}
        ahead = list(onward.get(fork, ()))
        while ahead and own in joins:
            node = ahead.pop()
            if node not in seen:
                seen.add(node)
                ahead += onward.get(node, ())
        nested |= (seen & joins) - {own}
    return frozenset(nested)


def _old_versions(tales: list[Tale]) -> None:
    first: dict[tuple[str, int], int] = {}
    for tale in tales:
        key = (tale.process, tale.version)
        first[key] = min(first.get(key, tale.first_seq), tale.first_seq)
    for tale in tales:
        newer = [seq for (process, version), seq in first.items() if process == tale.process and version > tale.version]
        if newer and min(newer) < tale.last_seq:
            tale.found["old_version_went_on"] += 1


def _look_at_operations(world: World, keys: set[str]) -> None:
    answered: Counter[str] = Counter()
    for operation in world.operations:
        if not operation.is_acknowledged:
            continue
        if operation.call == "start" and not operation.answer["new"]:
            world.probe("start_repeated_same_answer")
        elif operation.call == "publish" and operation.answer.get("repeated"):
            world.probe("duplicate_request_answered_from_record")
        elif operation.key in keys:
            answered[operation.key] += 1
    for count in answered.values():
        if count > 1:
            world.probe("duplicate_request_answered_from_record")


def _look_at_ledger(world: World, tales: list[Tale]) -> None:
    for tale in tales:
        for task, attempt, epoch in tale.withdrawn:
            lines = world.ledger.under(f"{tale.id}/{task}")
            if any(line.attempt == attempt and line.epoch == epoch for line in lines):
                world.probe("late_result_refused")


def _look_at_subscribers(world: World) -> None:
    for subscriber in world.subscribers:
        failed: Counter[int] = Counter()
        for delivery in subscriber.deliveries:
            if not delivery.is_taken:
                failed[delivery.seq] += 1
            elif not delivery.is_first:
                world.probe("delivered_again")
            elif failed[delivery.seq]:
                world.probe("subscriber_held_and_released")
                if failed[delivery.seq] >= subscriber.tries:
                    world.probe("subscriber_needed_an_operator")
