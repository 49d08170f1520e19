"""Pictures of worlds: well-formed whatever the texts are, and readable however much happened."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.simulations.lanes import Layout, place
from understudy.simulations.timeline import timeline_html, timeline_svg
from understudy.simulations.trace import Moment
from understudy.simulations.transcript import MARKS

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "</title><script>alert('&\"')</script>\x1b[31m\u202e\x00\ud800"


class Story:
    """Plausible moments: nodes that live, pause and die, clients that call, instances that commit."""

    def __init__(self, seed: int, *, instances: int = 8, nodes: tuple[str, ...] = ("a",)) -> None:
        self.random = Random(seed)
        self.instances = [f"order-{number}" for number in range(instances)]
        self.nodes = nodes
        self.lives = dict.fromkeys(nodes, 0)
        self.up: set[str] = set()
        self.paused: set[str] = set()
        self.versions = dict.fromkeys(self.instances, 0)
        self.step = 0
        self.at_ms = 1_767_225_600_000
        self.moments: list[Moment] = []

    def tell(self, most: int, *, violation: str = "") -> list[Moment]:
        while len(self.moments) < most:
            self._go_on()
        if violation:
            self._say("", "world", "violation", violation, violation.split()[1].rstrip(":"))
        return self.moments

    def _go_on(self) -> None:
        self.step += 1
        chance = self.random.random()
        node = self.random.choice(self.nodes)
        if node not in self.up:
            self._open(node)
        elif node in self.paused:
            if chance < 0.2:
                self.paused.discard(node)
                self._say(node, "world", "resume", "goes on")
        elif chance < 0.012:
            self._crash(node)
        elif chance < 0.02:
            self.paused.add(node)
            self._say(node, "world", "pause", "stopped")
        elif chance < 0.05:
            self._pass_time()
        elif chance < 0.06:
            self._say(node, "disk", "fault", "disk full at write 14")
        elif chance < 0.25:
            self._call(node)
        else:
            self._commit(node)

    def _open(self, node: str) -> None:
        self.lives[node] += 1
        self.up.add(node)
        self._say(node, "world", "open", f"life {self.lives[node]}, epoch {sum(self.lives.values())}")

    def _crash(self, node: str) -> None:
        self.up.discard(node)
        self._say("", "world", "probe", "landed_and_died")
        self._say(self._life(node), "world", "fault", "crash after commit")
        self._say(node, "world", "crash", "crash after commit")

    def _pass_time(self) -> None:
        self.at_ms += self.random.choice((3, 40, 900, 20_000, 3 * 86_400_000))
        self._say("", "clock", "timer", "an alarm rings")

    def _call(self, node: str) -> None:
        instance = self.random.choice(self.instances)
        client = f"client {self.random.choice(('ann', 'bob'))}"
        self._say("", client, "call", f"send {instance} k{self.step}", instance)
        self._next(self._life(node), "world", "job", f"call send {self.step}")
        self._next(self._life(node), instance, "message", "order: Send go", instance)
        self._say("", client, "answer", "send done", instance)

    def _commit(self, node: str) -> None:
        instance = self.random.choice(self.instances)
        life = self._life(node)
        self.versions[instance] += 1
        self._next(life, "handlers", "job", f"run {instance}/4/1", instance)
        self._next(life, instance, "message", "order: CompleteTask token 3 task 4 attempt 1", instance)
        self._next(life, "persistence", "message", f"write {instance} version {self.versions[instance]}")
        self._next(life, "persistence", "message", "flush")
        self._next(life, instance, "commit", f"committed version {self.versions[instance]}", instance)

    def _life(self, node: str) -> str:
        return f"{node}.{self.lives[node]}"

    def _next(self, node: str, lane: str, kind: str, text: str, instance: str = "") -> None:
        self.step += 1
        self._say(node, lane, kind, text, instance)

    def _say(self, node: str, lane: str, kind: str, text: str, instance: str = "") -> None:
        self.moments.append(Moment(self.step, self.at_ms, node, lane, kind, text, instance))


LOST = "I8 order-3: an acknowledged message stands in no history"


def pictured(moments: list[Moment], **more: int) -> ElementTree.Element:
    picture = timeline_svg(moments, title="mixed, seed 4", drawn=["crash (0.01)"], violations=[LOST], **more)
    return ElementTree.fromstring(picture)


def of_class(root: ElementTree.Element, class_: str) -> list[ElementTree.Element]:
    return [each for each in root.iter() if class_ in each.get("class", "").split()]


def hints(root: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in root.iter(f"{SVG}title")]


def labels(root: ElementTree.Element) -> list[str]:
    """What stands at the lanes, from the top down; the hint of a label is not what one sees."""
    return [each.text or "" for each in of_class(root, "label")]


class Strict(HTMLParser):
    """Follows which elements are open: whatever is left or crossed at the end is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002  # As its base.
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:  # noqa: ARG002  # As its base.
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# --- where things stand -----------------------------------------------------------------------------------------------


def test_lanes_stand_in_their_order() -> None:
    moments = [
        Moment(1, 0, "", "client bob", "call", "start x", "x"),
        Moment(2, 0, "a.1", "handlers", "job", "run x/1/1", "x"),
        Moment(3, 0, "a.1", "zebra", "message", "order", "zebra"),
        Moment(4, 0, "a.1", "x", "message", "order", "x"),
        Moment(5, 0, "a.1", "loader", "message", "load"),
        Moment(6, 0, "a.1", "persistence", "message", "write"),
        Moment(7, 0, "", "clock", "timer", "rings"),
        Moment(8, 0, "", "disk", "fault", "full"),
        Moment(9, 0, "a", "world", "open", "life 1"),
        Moment(10, 0, "", "world", "fault", "crash"),
    ]

    found = labels(pictured(moments))

    assert found == [
        *("world", "node a", "disk", "clock"),
        *("persistence", "loader"),
        *("zebra", "x"),
        *("handlers", "client bob"),
    ]


def test_the_lives_of_a_node_share_their_lanes() -> None:
    moments = [Moment(life, 0, f"a.{life}", "persistence", "message", "flush") for life in range(1, 30)]

    assert labels(pictured(moments)) == ["persistence"]


def test_of_several_nodes_each_has_its_lanes() -> None:
    moments = [Moment(step, 0, f"{node}.1", "persistence", "message", "flush") for step, node in enumerate("ab")]

    assert labels(pictured(moments)) == ["a persistence", "b persistence"]


@pytest.mark.parametrize(
    ("life", "node"), [("a.3", "a"), ("a", "a"), ("", ""), ("eu.west", "eu.west"), ("v1.2.7", "v1.2")]
)
def test_a_life_belongs_to_its_node(life: str, node: str) -> None:
    assert place(life) == node


def test_a_step_is_further_right_than_the_one_before_it_however_many_steps_are_between() -> None:
    layout = Layout([Moment(step, 0, "", "world", "job", "x") for step in (1, 2, 5_000)])

    assert layout.columns == [0, 1, 2]


def test_no_mark_covers_another_of_its_lane() -> None:
    layout = Layout(Story(3, nodes=("a", "b")).tell(600, violation=LOST))

    places = list(zip(map(layout.row, layout.moments), layout.columns, strict=True))

    assert len(set(places)) == len(places)
    assert layout.columns == sorted(layout.columns)


def test_beyond_forty_lanes_the_quietest_instances_share_one() -> None:
    moments = Story(5, instances=90).tell(2_000, violation=LOST)
    all_lanes = Layout(moments, most_lanes=1_000).lanes

    found = [lane.label for lane in Layout(moments).lanes]

    assert len(all_lanes) > 90
    assert len(found) == 40
    assert "order-3" in found  # Something does not hold of it.
    assert f"others ({len(all_lanes) - 39})" in found
    assert {lane.label for lane in all_lanes if lane.group != 2} < {*found}


def test_only_the_last_moments_are_drawn_and_the_rest_is_counted() -> None:
    moments = Story(5).tell(2_000, violation=LOST)

    root = pictured(moments)

    assert len(of_class(root, "moment")) == 400
    assert re.search(r"2,0\d\d moments, the first 1,[56]\d\d are left out", "".join(root.itertext()))


def test_a_violation_stands_at_its_instance_with_a_callout() -> None:
    moments = Story(4).tell(100, violation=LOST)
    layout = Layout(moments)

    assert layout.lanes[layout.row(moments[-1])].name == "order-3"
    assert of_class(pictured(moments), "callout-text")[0].text == LOST


def test_a_crash_goes_through_all_lanes_and_says_what_it_was() -> None:
    moments = [*Story(4).tell(40), Moment(900, 0, "a", "world", "crash", "killed at write 7")]

    root = pictured(moments)

    lines = [each.get("d", "") for each in of_class(root, "crash-line")]
    assert lines
    assert "a: killed at write 7" in [each.text for each in of_class(root, "callout-text")]


def test_callouts_do_not_cover_each_other() -> None:
    moments = [Moment(step, 0, "a", "world", "crash", f"killed at write {step}") for step in range(30)]

    boxes = [
        tuple(float(each.get(name, 0)) for name in ("x", "y", "width"))
        for each in of_class(pictured(moments), "callout")
    ]

    assert len(boxes) >= 5
    for x, y, width in boxes:
        assert not [other for other in boxes if other[1] == y and x < other[0] < x + width]


def test_a_pause_and_the_time_without_an_owner_are_bands() -> None:
    told = [(1, "open"), (5, "pause"), (9, "resume"), (12, "crash"), (15, "open"), (20, "close")]
    moments = [Moment(step, 0, "a", "world", kind, kind) for step, kind in told]

    spans = [(span.kind, span.node) for span in Layout(moments).spans()]

    assert spans == [("down", "a"), ("down", "a"), ("paused", "a")]


def test_a_pause_ends_with_the_life() -> None:
    moments = [
        Moment(step, 0, "a", "world", kind, kind) for step, kind in enumerate(("open", "pause", "crash", "open"))
    ]

    layout = Layout(moments)

    assert [(span.kind, span.last) for span in layout.spans()] == [
        ("down", layout.columns[3]),
        ("paused", layout.columns[2]),
    ]


def test_a_jump_of_time_is_marked() -> None:
    moments = [Moment(step, step + (step > 5) * 3 * 86_400_000, "", "world", "job", "x") for step in range(10)]

    root = pictured(moments)

    assert [each.text for each in of_class(root, "jumped")] == ["3d 0h pass"]
    assert len(of_class(root, "jump")) == 1


def test_a_commit_is_joined_to_its_instance_wherever_it_is_told() -> None:
    moments = [
        Moment(1, 0, "a.1", "x", "message", "order", "x"),
        Moment(2, 0, "a.1", "y", "message", "order", "y"),
        Moment(3, 0, "a.1", "persistence", "commit", "version 1", "y"),
        Moment(4, 0, "a.1", "x", "commit", "version 2", "x"),
    ]
    layout = Layout(moments)

    joined = [[layout.lanes[row].name for row in layout.joined(moment)] for moment in moments[2:]]

    assert joined == [["persistence", "y"], ["persistence", "x"]]
    assert len(of_class(pictured(moments), "join")) == 2


def test_pointing_at_a_mark_tells_what_it_was() -> None:
    root = pictured([Moment(7, 0, "a.2", "m5", "commit", "committed version 3", "m5")])

    assert "step 7, +0.000s, a.2 m5\ncommit: committed version 3" in hints(root)


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*MARKS, "something new"])
def test_every_kind_is_drawn(kind: str) -> None:
    root = pictured([Moment(1, 0, "a", "world", kind, "text")])

    assert len(of_class(root, "moment")) == 1


def test_a_world_without_moments_is_drawn_too() -> None:
    assert pictured([]).tag == f"{SVG}svg"
    assert "<tbody>" in timeline_html([], title="", drawn=[], violations=[])


@given(st.text(), st.text(), st.text(), st.sampled_from([*MARKS]))
def test_whatever_the_texts_are_the_picture_is_well_formed(node: str, lane: str, words: str, kind: str) -> None:
    moments = [Moment(1, 0, node, lane, kind, words, lane)]

    picture = timeline_svg(moments, title=words, drawn=[words], violations=[words])
    page = timeline_html(moments, title=words, drawn=[words], violations=[words])

    assert ElementTree.fromstring(picture).tag == f"{SVG}svg"
    strict = Strict()
    strict.feed(page)
    strict.close()
    assert strict.open == []


def test_no_text_becomes_markup() -> None:
    moments = [Moment(1, 0, NASTY, NASTY, "violation", NASTY, NASTY), Moment(2, 0, "", "world", "crash", NASTY)]

    for made in (
        timeline_svg(moments, title=NASTY, drawn=[NASTY], violations=[NASTY]),
        timeline_html(moments, title=NASTY, drawn=[NASTY], violations=[NASTY]),
    ):
        assert "<script" not in made
        assert all(character.isprintable() or character == "\n" for character in made)
        assert made.encode("utf-8")


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = timeline_html(Story(4).tell(300), title="t", drawn=["d"], violations=[])
    strict = Strict()

    strict.feed(page)

    assert not {"script", "link", "img", "iframe", "object"} & set(strict.seen)
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|\bon\w+=", page)


def test_the_page_knows_light_and_dark() -> None:
    for made in (
        timeline_svg([], title="", drawn=[], violations=[]),
        timeline_html([], title="", drawn=[], violations=[]),
    ):
        assert "prefers-color-scheme: dark" in made


def test_each_mark_of_the_page_leads_to_its_line() -> None:
    page = timeline_html(Story(4).tell(500), title="t", drawn=[], violations=[])

    links, lines = re.findall(r'href="#(m\d+)"', page), re.findall(r'<tr id="(m\d+)"', page)

    assert links == lines
    assert len(lines) == 400


def test_the_same_moments_give_the_same_picture() -> None:
    one, two = (timeline_html(Story(9).tell(300), title="t", drawn=["d"], violations=[LOST]) for _ in range(2))

    assert one == two
