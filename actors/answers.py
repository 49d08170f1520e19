"""How whoever has ordered something hears of it. A refusal is an answer, never silence."""

from __future__ import annotations

from typing import Any

import msgspec

from understudy.actors.messages import Order
from understudy.actors.promise import Promise
from understudy.model.decide import Decision
from understudy.model.errors import Closed, Conflict, OutcomeUnknown, Unavailable, UnderstudyError
from understudy.store.commit import Answered


def answer(order: Order, error: UnderstudyError | None, value: Any = None) -> None:
    if order.answer is None:
        return
    if error is not None:
        order.answer.reject(_honest(order, error))
    else:
        order.answer.resolve(value)


def _honest(order: Order, error: UnderstudyError) -> UnderstudyError:
    """Who goes before the store was read again cannot say that nothing was done."""
    if order.may_be_done and isinstance(error, Closed | Unavailable):
        return OutcomeUnknown(f"it was written, and whether it landed could not be seen ({error}); look, or ask again")
    return error


def answer_as_before(order: Order, first: Answered) -> None:
    """A key stands for one command: the same content gets the first answer, other content none."""
    if first.digest == order.command.digest:
        answer(order, None, msgspec.json.decode(first.answer))
    else:
        answer(order, Conflict(f"the key {order.command.key!r} was used before with other content"))


def answer_recalled(order: Order, decision: Decision, recalled: Promise[Any]) -> None:
    error = recalled.error
    first: Answered | None = None if error is not None else recalled.get()
    if isinstance(error, UnderstudyError):
        answer(order, error)
    elif first is not None:
        answer_as_before(order, first)
    else:
        answer(order, decision.refusal, decision.answer)
