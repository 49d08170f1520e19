"""A torn file reads as it was written, as it was after one of its commits, or not at all; and what passes is found."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from understudy.simulations.looking import Look, content_of, look, look_by_audit
from understudy.simulations.tearing import KINDS, PAGE_BYTES, Damage, Files, Sample, draw_damage, make_sample
from understudy.simulations.torn import UNCOVERED, Bench, Expected, TornReport, last_seq, torn_files
from understudy.store.connection import Settings
from understudy.store.operations import MoveCursor
from understudy.store.writer import Writer

CASES = 150
SEED = 5


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("sample") / "made")


@pytest.fixture(scope="module")
def expected(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(sample, tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> TornReport:
    return torn_files(tmp_path_factory.mktemp("torn"), cases=CASES, seed=SEED)


# --- what must hold ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_torn_file_passes_for_another_one(report: TornReport) -> None:
    assert report.total("silent") == 0


@pytest.mark.slow
def test_whatever_is_torn_the_errors_are_ours(report: TornReport) -> None:
    assert report.violations == ()


@pytest.mark.slow
@pytest.mark.parametrize("index", ["wait_due", "instance_runnable"])
def test_no_flip_in_an_index_passes_unnoticed(tmp_path: Path, index: str) -> None:
    with Bench(tmp_path, SEED) as bench:
        outcomes = [bench.judge(damage) for damage in flips_of(bench.sample, tmp_path / "a.db", index)]

        assert "silent" not in outcomes


@pytest.mark.slow
def test_all_kinds_of_damage_and_all_outcomes_occur(report: TornReport) -> None:
    assert sorted(report.outcomes) == sorted(KINDS)
    assert sum(sum(counts.values()) for counts in report.outcomes.values()) == report.cases == CASES
    assert all(report.total(outcome) for outcome in ("same", "prefix", "refused"))
    assert all(report.refused_by[who] for who in ("open", "load", "read", "audit"))
    assert (report.audits >= CASES // 5, report.openings, report.rollbacks > 0) == (True, 10, True)


def test_a_log_reads_up_to_its_last_whole_commit(sample: Sample, expected: Expected, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    ends = expected.logs.second

    for number, end in enumerate(ends, len(expected.logs.first)):
        attrs.evolve(sample.second, log=sample.second.log[:end]).write(path)
        assert expected.commits(content_of(path)) == number + 1
        attrs.evolve(sample.second, log=sample.second.log[: end - 1]).write(path)
        assert expected.commits(content_of(path)) == number


def test_an_audit_sees_that_a_subscriber_was_told_more_than_there_is(
    sample: Sample, expected: Expected, tmp_path: Path
) -> None:
    path = tmp_path / "a.db"
    told = last_seq(expected.whole)
    end = expected.logs.second[len(expected.logs.second) // 2]
    attrs.evolve(sample.second, log=sample.second.log[:end]).write(path)
    assert look_by_audit(path, Look()) == ()

    writer = Writer(str(path), Settings())
    writer.take_over("outside")
    writer.run(MoveCursor("outside", told))
    writer.close()

    assert look_by_audit(path, Look()) == ("I8",)


def flips_of(sample: Sample, path: Path, index: str) -> Iterator[Damage]:
    """One flip in each byte in use of the index's page."""
    sample.whole.write(path)
    database = sqlite3.connect(path)
    page = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (index,)).fetchone()[0] - 1
    database.close()
    file = sample.whole.file
    for byte in range(page * PAGE_BYTES, (page + 1) * PAGE_BYTES):
        if file[byte]:
            flipped = file[:byte] + bytes([file[byte] ^ 1]) + file[byte + 1 :]
            yield Damage(kind="file flip", where=f"{index}, byte {byte}, bit 0", files=Files(file=flipped))


# --- the sample and its damage ----------------------------------------------------------------------------------------


def test_a_sample_is_the_same_each_time_and_has_a_row_in_every_table(
    sample: Sample, expected: Expected, tmp_path: Path
) -> None:
    again = make_sample(tmp_path / "again")

    assert again.whole == sample.whole
    assert [len(again.first.log), len(again.second.log)] == [len(sample.first.log), len(sample.second.log)]
    assert [table for table, rows in expected.whole.items() if not isinstance(rows, list) or not rows] == []
    assert len(sample.whole.file) < 400_000


def test_a_case_is_drawn_from_the_seed_and_its_number_alone(sample: Sample, expected: Expected) -> None:
    first, again = ([draw_damage(random.Random(f"7/{n}"), sample, expected.logs) for n in range(60)] for _ in "ab")

    assert first == again
    assert len({damage.where for damage in first}) > 50


def test_one_case_is_looked_at_again_by_its_number(tmp_path: Path) -> None:
    report = torn_files(tmp_path, cases=CASES, seed=SEED, only=3)

    assert (report.cases, len(report.outcomes)) == (1, 1)
    assert not logging.getLogger("understudy").disabled
    assert not (tmp_path / "torn").exists()


# --- what is looked for is seen ---------------------------------------------------------------------------------------


def changed(sample: Sample, path: Path, statement: str) -> None:
    sample.whole.write(path)
    database = sqlite3.connect(path)
    database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize(
    ("statement", "who"),
    [
        ("PRAGMA user_version = 99", "open"),
        ("UPDATE instance SET title = 'another' WHERE id = 'journey-1'", "load"),
        ("UPDATE token SET attempt = attempt + 1", "load"),
        ("UPDATE history SET digest = 'x' WHERE seq = (SELECT head FROM instance WHERE id = 'nap-5')", "load"),
        ("DROP TABLE held", "read"),
    ],
)
def test_what_was_changed_is_refused(
    sample: Sample, expected: Expected, tmp_path: Path, statement: str, who: str
) -> None:
    changed(sample, tmp_path / "a.db", statement)

    found = look(tmp_path / "a.db", expected.ids, closely=True)

    assert (found.refused_by, found.surprises) == (who, [])


def test_what_only_an_audit_can_see_is_seen_by_it(sample: Sample, expected: Expected, tmp_path: Path) -> None:
    changed(sample, tmp_path / "a.db", "UPDATE history SET at_ms = at_ms + 1 WHERE seq = 1")
    found = look(tmp_path / "a.db", expected.ids, closely=True)
    assert found.refused_by == ""

    ids = look_by_audit(tmp_path / "a.db", found)

    assert (found.refused_by, set(ids)) == ("audit", {"I11"})


@pytest.mark.parametrize("table", sorted({*UNCOVERED} - {"schema"}))
def test_a_row_without_a_checksum_differs_only_in_the_content(
    sample: Sample, expected: Expected, tmp_path: Path, table: str
) -> None:
    """Once such rows have one, this fails, and `UNCOVERED` gets shorter."""
    columns = {"owner": "address", "message": "payload", "request": "answer", "work": "result", "held": "error"}
    column = columns.get(table, "name")
    changed(
        sample,
        tmp_path / "a.db",
        f"UPDATE {table} SET {column} = '\"other\"'" + (" || name" if column == "name" else ""),
    )

    found = look(tmp_path / "a.db", expected.ids, closely=True)

    content = content_of(tmp_path / "a.db")
    assert (found.refused_by, look_by_audit(tmp_path / "a.db", found), found.surprises) == ("", (), [])
    assert [name for name in content if content[name] != expected.whole[name]] == [table]


def test_a_report_becomes_a_table(report: TornReport) -> None:
    rows = dict(report.rows())

    assert rows["torn files"] == f"{CASES}"
    assert set(KINDS) < set(rows)
