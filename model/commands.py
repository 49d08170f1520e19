"""What an instance can be asked to do. Time enters here: the rules read no clock.

Commands from outside (`Start`, `Send`, `Cancel`, …) may carry a key, under which their answer is stored. Commands
from inside are recognised by what they are about (task and attempt, wait, message), so that a second delivery changes
nothing.
"""

from __future__ import annotations

import msgspec

from understudy.model.instance import Fault


class Command(msgspec.Struct, frozen=True, kw_only=True):
    at_ms: int
    by: str = ""
    key: str = ""  # Same key and content: the first answer. Same key, other content: a conflict.
    digest: str = ""  # Of the content, when there is a key.

    @property
    def cause(self) -> str:
        return type(self).__name__.lower()


class Start(Command, frozen=True, kw_only=True):
    id: str
    given_digest: str
    variables: dict[str, str]
    title: str = ""
    tags: dict[str, str] = {}
    trigger: str = "api"
    caused_by: str = ""


class Send(Command, frozen=True, kw_only=True):
    name: str
    payload: str = "null"
    about: str = ""  # The correlation key; empty fits any wait of that name.
    expires_ms: int | None = None

    @property
    def cause(self) -> str:
        return f"send {self.name}"


class Cancel(Command, frozen=True, kw_only=True):
    reason: str = ""
    undo: bool = True


class Pause(Command, frozen=True, kw_only=True):
    pass


class Resume(Command, frozen=True, kw_only=True):
    pass


class Resolve(Command, frozen=True, kw_only=True):
    """An operator's word on an incident: retry, skip or fail."""

    how: str
    incident: int = 0  # 0 means the only open one.
    result: str = "null"
    to: str = ""

    @property
    def cause(self) -> str:
        return self.how


class CompleteTask(Command, frozen=True, kw_only=True):
    token: int
    attempt: int
    task: int = 0  # A token goes from step to step and its attempts count from one at each: this says which step.
    result: str = "null"
    recorded: bool = False

    @property
    def cause(self) -> str:
        return "task done"


class FailTask(Command, frozen=True, kw_only=True):
    token: int
    attempt: int
    task: int = 0
    fault: Fault

    @property
    def cause(self) -> str:
        return "task failed"


class FireTimer(Command, frozen=True, kw_only=True):
    wait: int

    @property
    def cause(self) -> str:
        return "timer"


class Deliver(Command, frozen=True, kw_only=True):
    """A published message that the writer has matched to a wait of this instance."""

    message: int
    wait: int
    payload: str

    @property
    def cause(self) -> str:
        return "message"


class Recover(Command, frozen=True, kw_only=True):
    """The first command of an activation whose instance was moving: its attempts are lost, its ready tokens go on."""

    recorded: dict[int, str] = {}  # Results of transactional tasks by the number of their opening.
    spared: frozenset[int] = frozenset()  # Tokens whose attempt still runs here, or was never begun: it is not lost.


AnyCommand = Start | Send | Cancel | Pause | Resume | Resolve | CompleteTask | FailTask | FireTimer | Deliver | Recover
