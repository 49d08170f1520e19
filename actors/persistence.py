"""The actor through which every write goes.

It takes everything that waits, writes it as one statement, and tells each sender. It never lingers: while one batch
is written the next one gathers by itself. It is *open*; *degraded* after a failure that leaves the outcome unknown,
until a new connection works; *fenced* when a newer owner has taken over; *damaged* when the file is: the last two are
final.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from understudy.actors.clock import Clock
from understudy.actors.dispatcher import PooledActor, Scheduler
from understudy.actors.messages import (
    Committed,
    Flush,
    Forget,
    Lend,
    NotCommitted,
    Reopen,
    Returned,
    Run,
    Unsure,
    Write,
)
from understudy.actors.pool import Abandoned, Job, Outcome, Overran, Pool, Raised
from understudy.actors.pool import Returned as Gave
from understudy.model.errors import (
    Closed,
    Conflict,
    Damaged,
    Fenced,
    OutcomeUnknown,
    TimedOut,
    Unavailable,
    UnderstudyError,
)
from understudy.store.lending import Loan
from understudy.store.writer import Delivery, Landed, Unknown, Writer

MOST_TOGETHER: Final = 1_000  # Commits in one statement.
MOST_CHARACTERS: Final = 16_000_000  # In one statement: SQLite holds it in memory several times.
FIRST_BACKOFF_MS: Final = 50
LONGEST_BACKOFF_MS: Final = 5_000


class Health(Enum):
    """Whether the writer can write."""

    OPEN = "open"
    DEGRADED = "degraded"
    FENCED = "fenced"
    DAMAGED = "damaged"


class PersistenceActor(PooledActor):
    """Owns the writer."""

    def __init__(
        self,
        writer: Writer,
        *,
        clock: Clock,
        pool: Pool,
        committed: Callable[[list[str], list[Delivery]], None],
        changed: Callable[[Health, str], None],
        dispatcher: Scheduler,
    ) -> None:
        super().__init__(dispatcher=dispatcher)
        self._writer = writer
        self._clock = clock
        self._pool = pool
        self._committed = committed  # Told after each batch: whose commits landed, or may have, and what was matched.
        self._changed = changed  # Told when the health changes.
        self._pending: deque[Write] = deque()
        self._operations: deque[Run | Lend] = deque()
        self._flush_told = False
        self._loan: tuple[Loan, Lend] | None = None
        self._unsure: list[str] = []  # Whose commits may have landed.
        self._backoff_ms = FIRST_BACKOFF_MS
        self.health = Health.OPEN
        self.reason = ""
        self.batches = 0
        self.commits = 0
        self.lent_ms = 0  # How long commits have waited for transactional tasks, in all.
        self._lent_since_ms = 0

    def on_receive(self, message: Any) -> None:
        kind = type(message)
        if kind is Write:
            self._pending.append(message)
            self._soon()
        elif kind is Flush:
            self._flush_told = False
            self._flush()
        elif kind is Forget:
            self._writer.forget(message.no)
        elif kind is Run or kind is Lend:
            self._operations.append(message)
            self._soon()
        elif kind is Returned:
            self._returned(message.loan, message.outcome)
        else:
            assert kind is Reopen, message
            self._reopen()

    def on_stop(self) -> None:
        self._call_loan()
        self._fail_all(Unavailable("the runtime has been stopped; nothing of this was done"))
        with contextlib.suppress(UnderstudyError, Unknown):
            self._writer.checkpoint()
        self._writer.close()

    def on_failure(self, _kind: Any, failure: BaseException | None, _trace: Any) -> None:
        self._call_loan()
        self._final(
            Health.DAMAGED, UnderstudyError(f"the writer met an internal error ({failure!r}); please report it")
        )
        self._writer.close()

    # --- batches ---

    def _soon(self) -> None:
        """Flush behind everything that waits in the inbox now."""
        if not self._flush_told:
            self._flush_told = True
            self.actor_ref.tell(Flush())

    def _flush(self) -> None:
        if self._loan is not None or self.health is Health.DEGRADED:
            return  # The end of the loan, or a new connection, flushes.
        if self.health is not Health.OPEN:
            self._final(self.health, self._final_error())
            return
        if self._pending:
            self._write()
        if self._operations and self.health is Health.OPEN:
            self._operate(self._operations.popleft())
        if (self._pending or self._operations) and self._loan is None:
            self._soon()

    def _write(self) -> None:
        writes = self._take()
        try:
            written = self._writer.write([write.change for write in writes], now_ms=self._clock.now_ms())
        except Unknown as error:
            self._degrade(str(error), writes)
            return
        except BaseException as error:
            self._pending.extendleft(reversed(writes))  # Whatever comes of us, they are told.
            if not isinstance(error, Fenced | Damaged):
                raise
            self._final(Health.FENCED if isinstance(error, Fenced) else Health.DAMAGED, error)
            return
        self.batches += 1
        landed: list[str] = []
        for write, result in zip(writes, written.results, strict=True):
            if isinstance(result, Landed):
                if write.ref is not None:
                    landed.append(write.change.id)  # type: ignore[union-attr]
                    write.ref.tell(Committed(result.stored))  # type: ignore[arg-type]
                elif write.answer is not None:
                    write.answer.resolve(result.answer)
            elif write.ref is not None:
                write.ref.tell(NotCommitted(result))
            elif write.answer is not None:
                self._answer_refused(write, result)
        self.commits += len(landed)
        self._committed(landed, written.deliveries)

    def _take(self) -> list[Write]:
        """The next batch; at least one change, however large."""
        pending = self._pending
        writes = [pending.popleft()]
        size = writes[0].change.size
        while pending and len(writes) < MOST_TOGETHER:
            size += pending[0].change.size
            if size > MOST_CHARACTERS:
                break
            writes.append(pending.popleft())
        return writes

    def _answer_refused(self, write: Write, result: Any) -> None:
        assert write.answer is not None
        for request in write.change.requests:
            first = result.first.get(request.key)
            if first is not None and first.digest == request.digest:
                write.answer.resolve({"message": 0, "repeated": True})
                return
        write.answer.reject(result.error)

    # --- operations and loans ---

    def _operate(self, message: Run | Lend) -> None:
        try:
            if isinstance(message, Lend):
                self._lend(message)
                return
            answer = self._writer.run(message.operation)
        except Unknown as error:
            self._operations.appendleft(message)
            self._degrade(str(error), [])
        except (Fenced, Damaged) as error:
            self._operations.appendleft(message)
            self._final(Health.FENCED if isinstance(error, Fenced) else Health.DAMAGED, error)
        except UnderstudyError as error:
            _settle(message, error)
        else:
            if message.answer is not None:
                message.answer.resolve(answer)

    def _lend(self, message: Lend) -> None:
        loan = Loan(self._writer, instance=message.instance, task=message.task, attempt=message.attempt)
        if loan.recorded is not None:
            loan.roll_back()
            message.done(loan.recorded)
            return
        self._loan = (loan, message)
        self._lent_since_ms = self._clock.now_ms()
        tell = self.actor_ref.tell
        # The pool counts from the handler's first line; what we can wait is counted from here.
        self._clock.after(
            "loan",
            message.timeout_ms,
            lambda: tell(Returned(loan, Overran(message.timeout_ms))),
        )
        job = Job(
            key=f"loan/{message.instance}/{message.task}/{message.attempt}",
            run=lambda: message.run(loan.lent),
            done=lambda outcome: tell(Returned(loan, outcome)),
            lane="transactional",
            timeout_ms=message.timeout_ms,
        )
        try:
            self._pool.submit(job)
        except UnderstudyError as error:
            self._call_loan()
            if not isinstance(error, Closed):  # Else the attempt stays outstanding, and the next owner makes it.
                message.done(error)

    def _returned(self, loan: Loan, outcome: Outcome) -> None:
        if self._loan is None or self._loan[0] is not loan:
            return  # It was over before: the handler came back after its limit.
        message = self._close_loan()
        try:
            result = self._end_loan(loan, outcome)
        except (Unknown, Damaged) as error:
            # It may have landed. Its turn comes again once the file is open anew, and finds the record if it has.
            self._operations.appendleft(message)
            if isinstance(error, Damaged):
                self._final(Health.DAMAGED, error)
            else:
                self._degrade(str(error), [])
            return
        message.done(result)
        self._soon()

    def _end_loan(self, loan: Loan, outcome: Outcome) -> str | BaseException:
        if isinstance(outcome, Gave):
            result = str(outcome.value)
            try:
                loan.commit(result)
            except Conflict as error:
                return error
            return result
        loan.roll_back()
        if isinstance(outcome, Raised):
            return outcome.error
        if isinstance(outcome, Abandoned):
            return Unavailable(outcome.reason)
        return TimedOut(f"the transaction was still open after {outcome.timeout_ms} ms and was rolled back")

    def _close_loan(self) -> Lend:
        assert self._loan is not None
        _loan, message = self._loan
        self._loan = None
        self._clock.after("loan", None, _nothing)
        self.lent_ms += self._clock.now_ms() - self._lent_since_ms
        return message

    def _call_loan(self) -> None:
        """Take the connection back at once; the handler hears of it at its next statement."""
        if self._loan is not None:
            loan = self._loan[0]
            self._close_loan()
            with contextlib.suppress(Unknown, UnderstudyError):
                loan.roll_back()

    # --- failure ---

    def _degrade(self, reason: str, writes: list[Write]) -> None:
        self._become(Health.DEGRADED, reason)
        for write in writes:
            if write.ref is not None:
                self._unsure.append(write.change.id)  # type: ignore[union-attr]
                write.ref.tell(Unsure(reason))
            elif write.answer is not None:
                write.answer.reject(OutcomeUnknown(f"{reason}; whether it landed is not known, repeat it with a key"))
        self._wait_and_reopen()

    def _wait_and_reopen(self) -> None:
        tell = self.actor_ref.tell
        self._clock.after("writer", self._backoff_ms, lambda: tell(Reopen()))
        self._backoff_ms = min(2 * self._backoff_ms, LONGEST_BACKOFF_MS)

    def _reopen(self) -> None:
        try:
            self._writer.reopen()
            self._writer.probe()
        except (Fenced, Damaged) as error:
            self._final(Health.FENCED if isinstance(error, Fenced) else Health.DAMAGED, error)
        except (UnderstudyError, Unknown) as error:
            self.reason = str(error)
            self._wait_and_reopen()
        else:
            self._backoff_ms = FIRST_BACKOFF_MS
            self._become(Health.OPEN, "")
            unsure, self._unsure = self._unsure, []
            self._committed(unsure, [])  # Who watches them must look: a commit that landed may have been the last one.
            self._soon()

    def _final(self, health: Health, error: UnderstudyError) -> None:
        if self.health is not health:
            self._become(health, str(error))
        self._fail_all(error)

    def _final_error(self) -> UnderstudyError:
        return Fenced(self.reason) if self.health is Health.FENCED else Damaged(self.reason)

    def _fail_all(self, error: UnderstudyError) -> None:
        while self._pending:
            write = self._pending.popleft()
            if write.ref is not None:
                write.ref.tell(Unsure(str(error)))
            elif write.answer is not None:
                write.answer.reject(error)
        while self._operations:
            _settle(self._operations.popleft(), error)

    def _become(self, health: Health, reason: str) -> None:
        self.health = health
        self.reason = reason
        self._changed(health, reason)


def _settle(message: Run | Lend, error: UnderstudyError) -> None:
    if isinstance(message, Lend):
        message.done(error)
    elif message.answer is not None:
        message.answer.reject(error)


def _nothing() -> None:
    pass
