"""What happened in a world, as a digest always and as words when somebody wants to read them.

The digest runs over every step and every commit, so that two runs of one seed can be compared without keeping either.
Words cost time: they are kept only by a trace that was made to record, and a failing seed is simply run again with one.
"""

from __future__ import annotations

import hashlib

import msgspec


class Moment(msgspec.Struct, frozen=True):
    """One thing that happened."""

    step: int
    at_ms: int  # In the world's time.
    node: str
    lane: str  # The actor, "handlers", "client NAME", "disk", "clock" or "world".
    kind: str  # message, job, timer, commit, call, answer, fault, crash, pause, resume, open, close, probe or violation
    text: str
    instance: str = ""


class Trace:
    """The digest of a run, and its moments if `recording`."""

    def __init__(self, *, recording: bool = False) -> None:
        self.recording = recording
        self.moments: list[Moment] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.update = self._hash.update

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, moment: Moment) -> None:
        """Of things that are rare: they count in the digest too, with all their words."""
        self._hash.update(f"{moment.at_ms} {moment.node} {moment.lane} {moment.kind} {moment.text}\n".encode())
        if self.recording:
            self.moments.append(moment)
