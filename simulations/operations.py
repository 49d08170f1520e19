"""What clients asked for and what they were told: the evidence for whatever must hold from the outside."""

from __future__ import annotations

from typing import Any

import msgspec


class Operation(msgspec.Struct, kw_only=True, eq=False):
    """One call of a client, from its invocation to its answer, if there ever was one.

    A client that gets no answer, or one that leaves it open, may call again under the same key: that is an operation
    of its own.
    """

    number: int
    client: str
    call: str
    instance: str
    parameters: dict[str, Any]
    key: str = ""
    invoked: int  # The step of the world.
    at_ms: int = 0
    returned: int | None = None  # Likewise; None while there is no answer.
    answer: Any = None
    error: str = ""  # The name of the error's class; empty when it was done.
    reason: str = ""
    is_unknown: bool = False  # It may have happened, now or later, or not at all.

    @property
    def is_acknowledged(self) -> bool:
        return self.returned is not None and not self.error and not self.is_unknown
