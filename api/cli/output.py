"""Where a command's words go: to people as text that fits their terminal, to programs as one JSON document.

Whatever comes from a database passes through `plain`: a title or an error may hold anything, also what would command
the terminal. Colours are for terminals only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from typing import IO, Any, Final

from rich.console import Console, RenderableType
from rich.text import Text

UNLIMITED: Final = 100_000  # The width where nobody looks: lines that programs read are not broken.
_COMMANDING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Output:
    """The standard streams, as one command uses them."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.stdout, self._stderr = sys.stdout, sys.stderr
        for stream in (self.stdout, self._stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # An id that the terminal cannot show is still shown.
        self._console = _console(self.stdout)
        self._aside = _console(self._stderr)

    @property
    def width(self) -> int:
        return self._console.width

    def say(self, *parts: RenderableType) -> None:
        """For people, on the standard output."""
        _say(self._console, self.stdout, parts)

    def aside(self, *parts: RenderableType) -> None:
        """For people, beside the result: on the standard error."""
        _say(self._aside, self._stderr, parts)

    def document(self, value: object) -> None:
        """For programs; once for each command."""
        is_unicode = (self.stdout.encoding or "utf-8").lower().startswith("utf")
        self.stdout.write(json.dumps(value, indent=2, ensure_ascii=not is_unicode) + "\n")

    def error(self, kind: str, message: str) -> None:
        if self.as_json:
            self.document({"error": {"kind": kind, "message": message}})
        else:
            self._stderr.write(f"understudy: {plain(message)}\n")
        self.flush()

    def flush(self) -> None:
        self.stdout.flush()
        self._stderr.flush()

    def abandon(self) -> None:
        """The reader has gone: what is still buffered must not complain when the interpreter ends."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stdout.fileno())
            os.close(nowhere)


def plain(text: str) -> str:
    """The text with everything made visible that a terminal would obey: control characters and changes of direction."""
    return _COMMANDING.sub(lambda found: ascii(found[0])[1:-1], text)


def styled(text: str, style: str = "") -> Text:
    return Text().append(plain(text), style=style)  # What is appended to it does not inherit the style.


def one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def _console(stream: IO[str]) -> Console:
    has_width = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(
        file=stream,
        width=None if has_width else UNLIMITED,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def _say(console: Console, stream: IO[str], parts: tuple[RenderableType, ...]) -> None:
    if console.is_terminal:
        console.print(*parts, sep="", crop=False)
        return
    with console.capture() as captured:
        console.print(*parts, sep="", crop=False)
    # Tables fill their last column up; in a file that is only noise.
    stream.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


Document = dict[str, Any]
