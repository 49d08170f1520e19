"""The commands that keep a database in order: audit, doctor, migrate."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from understudy.cli.output import Output, styled
from understudy.cli.source import check_file, opened
from understudy.model.errors import AlreadyOpen
from understudy.store.connection import explained, open_reader
from understudy.store.migrations import LATEST, version_of


def check_all(arguments: Namespace, output: Output) -> int:
    from understudy.audit import audit

    with opened(arguments.db) as source:
        return _report(audit(source.reads), output)


def examine_file(arguments: Namespace, output: Output) -> int:
    from understudy.doctor import examine

    return _report(examine(arguments.db), output)


def _report(report: Any, output: Output) -> int:
    if output.as_json:
        output.document(report.as_dict())
    else:
        for line in report.lines:
            output.say(styled(line))
    return 0 if report.ok else 1


def bring_up_to_date(arguments: Namespace, output: Output) -> int:
    before = _version(arguments.db)
    steps = list(range(before + 1, LATEST + 1))
    if steps and not arguments.dry_run:
        _migrate(arguments.db)
    if output.as_json:
        output.document({"schema": before, "latest": LATEST, "steps": steps, "done": not arguments.dry_run})
    elif not steps:
        output.say(styled(f"{arguments.db} has schema {before}, the latest; there is nothing to do."))
    else:
        verb = "would be brought" if arguments.dry_run else "was brought"
        output.say(styled(f"{arguments.db} {verb} from schema {before} to {LATEST}."))
    return 0


def _version(db: str) -> int:
    check_file(db)
    database = open_reader(db)
    try:
        with explained(db):
            return version_of(database, db)
    finally:
        database.close()


def _migrate(db: str) -> None:
    """Owning the file brings it up to date; an owner that lives would have done so, or is of an older version."""
    from understudy.runtime import Runtime

    with Runtime(db, role="operator") as runtime:
        if not runtime.is_owner:
            raise AlreadyOpen(f"{db} is in use by a service of an older version; stop it, then migrate")
