"""The schema's versions. Each step is numbered, changes the file in place and is one transaction.

The number stands in the file's `user_version`. A file of a newer number is refused, a file that is not ours is left
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from understudy.model.errors import NewerSchema, OlderSchema
from understudy.store.connection import Database, check_ours
from understudy.store.schema import APPLICATION_ID, INDEXES, TABLES

Step = Callable[[Database], None]


def _first(database: Database) -> None:
    with database.bind_ctx(TABLES):
        database.create_tables(TABLES, safe=False)
    connection = database.connection()
    for name, columns in INDEXES.items():
        connection.execute(f'CREATE INDEX "{name}" ON {columns}')
    connection.execute("INSERT INTO owner VALUES (0, '', 0, 0, '')")


STEPS: Final[tuple[Step, ...]] = (_first,)
LATEST: Final = len(STEPS)


def version_of(database: Database, path: str) -> int:
    """The number of the file's schema; 0 for an empty file."""
    check_ours(database, path)
    version: int = database.connection().execute("PRAGMA user_version").fetchone()[0]
    if version > LATEST:
        raise NewerSchema(
            f"{path} has schema {version}, this Understudy knows {LATEST}; upgrade the package before opening it"
        )
    return version


def migrate(database: Database, path: str) -> list[int]:
    """Bring the file to the latest schema; the numbers of the steps that were taken."""
    taken = []
    for number in range(version_of(database, path) + 1, LATEST + 1):
        with database.atomic("IMMEDIATE"):
            STEPS[number - 1](database)
            connection = database.connection()
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number}")
        taken.append(number)
    return taken


def check_latest(database: Database, path: str) -> None:
    """For readers: they cannot migrate."""
    version = version_of(database, path)
    if version < LATEST:
        raise OlderSchema(
            f"{path} has schema {version}, this Understudy reads {LATEST}; run `understudy migrate {path}`"
        )
