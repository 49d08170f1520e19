"""What the supervisor asks the store: which timers are near, and who moves by itself. All in pages, all by an index."""

from __future__ import annotations

from typing import Any

DUE = """
SELECT w.due_ms, i.id, w.id FROM wait w JOIN instance i ON i.no = w.instance
WHERE w.due_ms IS NOT NULL AND w.due_ms <= ? AND i.status <> 'ended' ORDER BY w.due_ms LIMIT ?
"""
NEXT = "SELECT min(due_ms) FROM wait WHERE due_ms IS NOT NULL AND due_ms > ?"
RUNNABLE = "SELECT no, id FROM instance WHERE runnable = 1 AND no > ? ORDER BY no LIMIT ?"
POSTED = """
SELECT DISTINCT m.instance, i.id FROM message m JOIN instance i ON i.no = m.instance
WHERE m.instance IS NOT NULL AND m.instance > ? ORDER BY m.instance LIMIT ?
"""
EXPIRED = """
SELECT EXISTS (SELECT 1 FROM message WHERE expires_ms <= ? AND instance IS NULL)
  OR EXISTS (SELECT 1 FROM request WHERE expires_ms <= ?)
"""


def due_waits(connection: Any, until_ms: int, limit: int) -> list[tuple[int, str, int]]:
    """The next timers: due, instance, wait."""
    return list(connection.execute(DUE, (until_ms, limit)))


def next_due_ms(connection: Any, after_ms: int) -> int | None:
    """When the first timer behind a moment is due."""
    row = connection.execute(NEXT, (after_ms,)).fetchone()
    return None if row[0] is None else int(row[0])


def runnable(connection: Any, after: int, limit: int) -> list[tuple[int, str]]:
    """Instances that move by themselves."""
    return list(connection.execute(RUNNABLE, (after, limit)))


def with_messages(connection: Any, after: int, limit: int) -> list[tuple[int, str]]:
    """Instances to which a published message was assigned that they have not consumed."""
    return list(connection.execute(POSTED, (after, limit)))


def has_expired(connection: Any, now_ms: int) -> bool:
    return bool(connection.execute(EXPIRED, (now_ms, now_ms)).fetchone()[0])
