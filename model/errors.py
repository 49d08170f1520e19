"""Every error that Understudy raises on purpose.

The class says who must act: the caller (`Rejected`), whoever lost a race (`Conflict`), time (`Unavailable`), the
operator of the disk (`Damaged`), the process author (`InvalidDefinition`), or the reader of an outcome
(`Unsuccessful`). A class's docstring is its default message, and every message ends with what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


class UnderstudyError(Exception):
    """Understudy could not do what was asked."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or " ".join((type(self).__doc__ or "").split()))


# --- the caller must change the request -------------------------------------------------------------------------------


class Rejected(UnderstudyError):
    """The request is not acceptable as it is; change it before asking again."""


class BadValue(Rejected):
    """A value cannot be stored as JSON; the message names the path to it."""


class BadInput(Rejected):
    """The input does not fit what the process takes."""


class UnknownProcess(Rejected):
    """No process of that name is deployed here; pass it to the Runtime."""


class UnknownInstance(Rejected):
    """There is no instance of that id in this database; `understudy list` shows those there are."""


class UnknownIncident(Rejected):
    """That incident is not open; `explain` lists the open ones."""


class AlreadyEnded(Rejected):
    """The instance has ended; it takes no further commands."""


class BadExpression(Rejected):
    """The expression is not in Understudy's expression language."""


class UsedAfterFork(Rejected):
    """This Runtime was opened before a fork; open a new one in the child process."""


class Closed(Rejected):
    """This Runtime has been closed; open a new one."""


class AlreadyOpen(Rejected):
    """This database has an owner already; use role="auto" or understudy.connect(path)."""


# --- somebody else was first ------------------------------------------------------------------------------------------


class Conflict(UnderstudyError):
    """Another writer won the race; read again and decide again."""


class Fenced(Conflict):
    """A newer owner has taken over this database; this Runtime can commit nothing more."""


# --- nobody is wrong; later may be better -----------------------------------------------------------------------------


class Unavailable(UnderstudyError):
    """The runtime cannot take this now; nothing was done, try again."""


class OutcomeUnknown(Unavailable):
    """Whether it was done is not known; look at the instance first, or repeat it with the same key."""


class TimedOut(UnderstudyError):
    """The wait ended before what was waited for; nothing was cancelled, ask again."""


# --- the storage is not what it should be -----------------------------------------------------------------------------


class Damaged(UnderstudyError):
    """What the storage holds is not what was written; restore a backup and run `understudy audit`."""


class NotOurs(Damaged):
    """The file is not an Understudy database; nothing was changed in it. Give another path."""


class NewerSchema(Damaged):
    """The database was written by a newer Understudy; upgrade the package before opening it."""


class OlderSchema(Damaged):
    """The database was written by an older Understudy; run `understudy migrate` first."""


# --- the process author must act --------------------------------------------------------------------------------------


@attrs.frozen
class Problem:
    """One thing that is wrong with a definition: what, where, and what would mend it."""

    code: str
    message: str
    node: str = ""
    place: str = ""  # The author's own "file:line", where it is known.
    hint: str = ""

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        hint = f"\n      {self.hint}" if self.hint else ""
        return f"{self.code}{where}: {self.message}{hint}"


class InvalidDefinition(UnderstudyError):
    """The process definition has problems; nothing was written."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        super().__init__(f"{name!r} has {len(self.problems)} problem(s):\n{lines}")


# --- the outcome is not a result --------------------------------------------------------------------------------------


class Unsuccessful(UnderstudyError):
    """The instance did not end with a result."""


class Failed(Unsuccessful):
    """The instance failed; the message says at which step, why, and what was undone."""


class Cancelled(Unsuccessful):
    """The instance was cancelled before it had a result."""


class Stuck(Unsuccessful):
    """The instance waits for an operator: retry, skip or fail the open incident."""
