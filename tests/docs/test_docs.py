"""What the documentation says, tried out.

Blocks of one page run in order, in one namespace, in a folder of their own. `python` blocks are run; one with
`file=NAME` is saved there, to be imported by later ones; a `text` block behind a `python` block is what that one has
printed, where `...` stands for whatever differs from run to run; functions called `test_…` are run with a rehearsal
or a simulation.
`console run` blocks are commands of ours with what they print; of other `console` blocks only the grammar is checked.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import understudy
from understudy import Rehearsal, Runtime
from understudy.actors.system import Limits
from understudy.cli import main
from understudy.cli.arguments import command_of, parse
from understudy.model import errors
from understudy.model.states import Outcome, Status, TokenStatus
from understudy.simulations import simulate

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ADRS = sorted((DOCS / "adr").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")), *ADRS]
FENCE = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@attrs.frozen
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    tag: str
    option: str
    text: str

    @property
    def file(self) -> str:
        return self.option.removeprefix("file=") if self.option.startswith("file=") else ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2], found[3])
        for found in FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_python() -> list[Path]:
    return [page for page in PAGES if any(block.tag == "python" for block in blocks_of(page))]


# --- the code ---------------------------------------------------------------------------------------------------------


class Reader:
    """Somebody who types a page in, block by block."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        self.module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
        self.names = self.module.__dict__
        self.printed: str | None = None  # By the block before.
        self.files: list[str] = []

    def read(self, block: Block) -> None:
        if block.tag == "python" and block.file:
            compile(block.text, block.file, "exec")
            (self.folder / block.file).write_text(block.text, encoding="utf-8")
            self.files.append(Path(block.file).stem)
        elif block.tag == "python":
            self.printed = self._run(block)
            return
        elif block.tag == "text" and self.printed is not None:
            _compare(block, block.text, self.printed)
        elif block.tag == "console" and block.option == "run":
            self._command(block)
        self.printed = None

    def _run(self, block: Block) -> str:
        known = dict(self.names)
        # The lines above keep the numbers in tracebacks and in error messages those of the page.
        source = "\n" * (block.line - 1) + block.text
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, block.page.name, "exec"), self.names)
        for name, value in list(self.names.items()):
            if name.startswith("test_") and value is not known.get(name):
                self._rehearse(name, value)
        return out.getvalue()

    def _rehearse(self, name: str, test: Callable[..., None]) -> None:
        asked = list(inspect.signature(test).parameters)
        if asked == ["simulation"]:
            marked = {key: value for mark in getattr(test, "pytestmark", ()) for key, value in mark.kwargs.items()}
            test(lambda *processes, **given: simulate(*processes, **marked, **given).raise_if_failed())
            return
        assert asked == ["rehearsal"], f"{name} can only ask for the rehearsal or the simulation"
        folder = self.folder / name
        folder.mkdir()
        with contextlib.closing(Rehearsal(folder)) as rehearsal:
            test(rehearsal)

    def _command(self, block: Block) -> None:
        line, _, shown = block.text.partition("\n")
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            main(shlex.split(line)[2:])
        _compare(block, shown, out.getvalue())

    def leave(self) -> None:
        for value in self.names.values():
            if isinstance(value, Runtime):
                value.close(timeout="1s")
        for name in (*self.files, self.module.__name__):
            sys.modules.pop(name, None)


def _compare(block: Block, shown: str, printed: str) -> None:
    same = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert same, f"{name_of(block.page)}:{block.line} shows\n{shown}\nbut this was printed\n{printed}"


@pytest.fixture
def reader_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Reader]]:
    readers: list[Reader] = []

    def begin(page: Path) -> Reader:
        reader = Reader(page, tmp_path)
        readers.append(reader)
        monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)
        return reader

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    yield begin
    for reader in readers:
        reader.leave()


@pytest.mark.parametrize("page", with_python(), ids=name_of)
def test_every_python_block_runs_and_prints_what_stands_below_it(
    page: Path, reader_of: Callable[[Path], Reader]
) -> None:
    reader = reader_of(page)

    for block in blocks_of(page):
        reader.read(block)


def test_the_program_of_the_quickstart_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    program = next(block for block in blocks_of(DOCS / "quickstart.md") if block.file == "orders.py")
    (tmp_path / "orders.py").write_text(program.text, encoding="utf-8")
    command = [sys.executable, "-u", "orders.py"]
    there: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    with subprocess.Popen(command, **there, **pipes) as first:
        assert first.stdout is not None
        before = [next(first.stdout) for _ in range(3)]
        first.send_signal(signal.SIGKILL)
    with subprocess.Popen(command, **there, **pipes) as second:
        after, _ = second.communicate("\n", timeout=30)

    assert "charging" in before[0]
    assert "order-7: waiting" in before[2]
    assert "charging" not in after
    assert "order 7 shipped" in after
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, 0)


# --- the command line -------------------------------------------------------------------------------------------------


def shown_commands() -> list[tuple[str, str]]:
    return [
        (f"{name_of(block.page)}:{block.line}", line.removeprefix("$ "))
        for page in PAGES
        for block in blocks_of(page)
        if block.tag == "console"
        for line in block.text.splitlines()
        if line.startswith("$ understudy")
    ]


@pytest.mark.parametrize(("place", "line"), shown_commands())
def test_every_command_that_is_shown_exists(place: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]

    arguments = parse(words)

    assert callable(command_of(arguments)), place


# --- what must be complete --------------------------------------------------------------------------------------------


def everything() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_diagrams_and_tables_are_those_of_the_code() -> None:
    generate = generator()
    pages = {page: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}

    stale = [page.name for page, text in pages.items() if generate.filled(text) != text]

    assert not stale, "run `python docs/generate.py`"
    assert set.union(*(generate.marked(text) for text in pages.values())) == set(generate.PARTS)


def test_every_state_is_explained() -> None:
    concepts = (DOCS / "concepts.md").read_text(encoding="utf-8")

    unexplained = [s.value for kind in (Status, Outcome, TokenStatus) for s in kind if f"`{s.value}`" not in concepts]

    assert not unexplained


def test_every_public_name_is_mentioned() -> None:
    text = everything()

    unmentioned = [name for name in understudy.__all__ if not re.search(rf"\b{name}\b", text)]

    assert not unmentioned


def test_every_error_is_listed() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    classes = [n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.UnderstudyError)]

    unlisted = [name for name in classes if f"`{name}`" not in page]

    assert not unlisted


def test_the_limits_and_their_defaults_are_those_of_the_code() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^\| `(\w+)` \| ([\d_]+) ", page, re.MULTILINE))

    assert {name: int(value) for name, value in written.items()} == attrs.asdict(Limits())


def test_the_arguments_of_a_runtime_and_their_defaults_are_those_of_the_code() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^\| `(\w+)=` \| `([^`]+)` ", page, re.MULTILINE))
    taken = inspect.signature(Runtime).parameters.values()

    defaults = {p.name: repr(p.default).replace("'", '"') for p in taken if p.kind is p.KEYWORD_ONLY}

    assert written == defaults


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "dependencies.md").read_text(encoding="utf-8")
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]

    names = [re.split(r"[<>=]", requirement)[0] for requirement in wanted]

    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert f"## [{understudy.__version__}]" in text


def test_decisions_are_numbered_without_gaps_fit_one_page_and_stand_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    lengths = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in ADRS}

    assert [page.name[:4] for page in ADRS] == [f"{number:04}" for number in range(1, len(ADRS) + 1)]
    assert max(lengths.values()) <= 50
    assert [page.name for page in ADRS if f"(adr/{page.name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]

    broken = [link for link in links if not _is_there(page, link)]

    assert not broken


def _is_there(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path) if path else page
    return target.exists() and (not anchor or anchor in _anchors(target))


def _anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
