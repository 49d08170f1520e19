"""The command `understudy`: look at a database of instances, and move them, from a shell.

Here a command line becomes an exit code: 0 done, 1 not done (or the instance did not complete), 2 wrong usage. What
a command needs is imported when it runs, so that `understudy --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.cli.output import Output

INTERRUPTED = 130  # What shells report for a command that Ctrl-C has ended,
PIPE_CLOSED = 141  # and for one whose reader has gone.


def main(argv: Sequence[str] | None = None) -> int:
    from understudy.cli.arguments import command_of, parse

    try:
        arguments = parse(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as stop:  # argparse has said why.
        return stop.code if isinstance(stop.code, int) else 2
    from understudy.cli.output import Output

    output = Output(as_json=arguments.json)
    try:
        code = command_of(arguments)(arguments, output)
        output.flush()
    except SystemExit as stop:  # The demonstration has arguments of its own.
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        output.abandon()
        return PIPE_CLOSED
    except Exception as error:
        if os.environ.get("UNDERSTUDY_DEBUG"):
            raise
        return _fail(error, output)
    return code


def _fail(error: Exception, output: Output) -> int:
    from understudy.model.errors import UnderstudyError

    message = str(error)
    if not isinstance(error, UnderstudyError):
        message = f"{type(error).__name__}: {error} (unexpected; UNDERSTUDY_DEBUG=1 shows where, please report it)"
    try:
        output.error(type(error).__name__, message)
    except BrokenPipeError:
        output.abandon()
    return 1
