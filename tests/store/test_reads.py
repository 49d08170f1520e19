"""What is read of instances, page by page."""

from __future__ import annotations

from pathlib import Path

from understudy import Process, Rehearsal, wait


def test_a_history_is_read_in_pages_from_the_newest_on(tmp_path: Path) -> None:
    process = Process("long", *(wait(f"m{number}") for number in range(10)))
    with Rehearsal(tmp_path, process) as rehearsal:
        rehearsal.start(process, id="other")
        order = rehearsal.start(process, id="long")
        for number in range(10):
            order.send(f"m{number}")
            rehearsal.send("other", f"m{number}")
        reads = rehearsal.node.reads

        pages = [reads.history("long", limit=4)]
        while pages[-1]:
            pages.append(reads.history("long", limit=4, before=pages[-1][0].seq))

        assert [len(page) for page in pages] == [4, 4, 3, 0]
        assert [record.n for page in reversed(pages) for record in page] == list(range(1, 12))
        assert reads.history("long") == [record for page in reversed(pages) for record in page]


def test_messages_that_nobody_wants_are_listed_in_pages(tmp_path: Path) -> None:
    with Rehearsal(tmp_path, Process("idle", wait("never"))) as rehearsal:
        for number in range(5):
            rehearsal.publish("stray", key=number)

        first = rehearsal.node.reads.unclaimed_messages(limit=3)
        second = rehearsal.node.reads.unclaimed_messages(limit=3, after=first[-1][0])

        assert [key for _, _, key, _ in first + second] == ["0", "1", "2", "3", "4"]
