"""Draws what the documentation shows of the code: state diagrams and tables, between markers in the pages.

Run it as `python docs/generate.py` after the tables in the code have changed; a test says when that is due. It writes
nothing outside the markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

import understudy.simulations.faults  # noqa: F401  # It fills the table.
from understudy.model.expressions import FUNCTIONS
from understudy.model.states import INSTANCE_TRANSITIONS, TOKEN_TRANSITIONS, Status, TokenStatus
from understudy.simulations.plugins import FAULTS

DOCS = Path(__file__).resolve().parent
S = TypeVar("S", bound=Enum)


def main() -> None:
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")


def filled(text: str) -> str:
    """The page with every marked part drawn anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[4]}", text)


def marked(text: str) -> set[str]:
    """The names of the parts that the page asks for."""
    return {found[2] for found in _MARKED.finditer(text)}


_MARKED = re.compile(r"(<!-- generated: ([a-z-]+) -->)\n(.*?)(<!-- end of \2 -->)", re.DOTALL)


# --- the parts --------------------------------------------------------------------------------------------------------


def state_diagram(transitions: Mapping[S, frozenset[S]], first: S) -> str:
    """A Mermaid diagram of all that can be reached from the first state; a state without a way on is an end."""
    lines = [f"    [*] --> {first.value}"]
    for state in _reached(transitions, first):
        targets = [target for target in transitions if target in transitions[state]]
        lines += [f"    {state.value} --> {target.value}" for target in targets]
        if not targets:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def functions_table() -> str:
    rows = [f"| `{function.signature}` | {function.says} |" for function in FUNCTIONS.values()]
    return "\n".join(["| function | gives |", "|---|---|", *rows])


def faults_table() -> str:
    """By kind, in the order in which the kinds are explained."""
    ordered = sorted(FAULTS.values(), key=lambda each: (KINDS.index(each.kind), each.name))
    rows = [f"| {each.kind} | `{each.name}` | {_sentence(each.__doc__)} | {each.must} |" for each in ordered]
    return "\n".join(["| kind | fault | what happens | must |", "|---|---|---|---|", *rows])


KINDS = ("process", "handlers", "messages", "time", "storage", "change")


def _sentence(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def _reached(transitions: Mapping[S, frozenset[S]], first: S) -> list[S]:
    found = {first}
    while new := {target for state in found for target in transitions[state]} - found:
        found |= new
    return [state for state in transitions if state in found]


PARTS: dict[str, Callable[[], str]] = {
    "instance-states": lambda: state_diagram(INSTANCE_TRANSITIONS, Status.PENDING),
    "token-states": lambda: state_diagram(TOKEN_TRANSITIONS, TokenStatus.CREATED),
    "functions": functions_table,
    "faults": faults_table,
}


if __name__ == "__main__":
    main()
