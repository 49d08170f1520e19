"""What the command line may say: the commands, their arguments, and where each is carried out.

A command is named here as "module:function", and the module is imported only when its command was given.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from understudy.model.states import Outcome, Status

Command = Callable[[argparse.Namespace, Any], int]
Add = Callable[[argparse.ArgumentParser], None]

DEMO: Final = "running:demo"  # It reads arguments of its own.
DESCRIPTION: Final = "Durable process instances: look at them, and move them."
EPILOG: Final = """\
DB is the path of a database file. Looking needs nobody else. A command that moves
something goes to the service that owns the database; if there is none, it is committed
here, and the next service that opens the database goes on from it.

Every command takes --json and --help. Exit codes: 0 done, 1 not done, 2 wrong usage.
NO_COLOR=1 turns colours off; UNDERSTUDY_DEBUG=1 shows where an error came from."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises SystemExit, as argparse does, after saying what is wrong."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    arguments.rest = rest
    arguments.json = getattr(arguments, "json", False)
    if arguments.rest and arguments.command != DEMO:
        parser.error(f"unrecognized arguments: {' '.join(arguments.rest)}")
    return arguments


def command_of(arguments: argparse.Namespace) -> Command:
    module, _, function = arguments.command.partition(":")
    found: Command = getattr(importlib.import_module(f"understudy.cli.{module}"), function)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="understudy",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    _json(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name, place, summary, add in _COMMANDS:
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
            add_help=place != DEMO,
        )
        command.set_defaults(command=place)
        add(command)
        _json(command)
    return parser


def _json(parser: argparse.ArgumentParser) -> None:
    # The option may stand before the command or behind it; a default would let the second place undo the first.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON document on stdout")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from understudy import __version__

        print(f"understudy {__version__}")
        parser.exit()


# --- arguments --------------------------------------------------------------------------------------------------------


def _nothing(_parser: argparse.ArgumentParser) -> None:
    pass


def _db(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("db", metavar="DB", help="the database file")


def _one(parser: argparse.ArgumentParser) -> None:
    _db(parser)
    parser.add_argument("id", metavar="ID", help="the instance's id")


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:PROCESS", type=_target, help="where the process is, as in shop:order")
    parser.add_argument("--db", default="understudy.db", metavar="PATH", help="the database file (%(default)s)")
    parser.add_argument("--input", type=_value, metavar="JSON", help="what the process takes")
    parser.add_argument("--id", metavar="ID", help="the instance's id; one that exists is gone on with")
    parser.add_argument("--timeout", type=_duration, metavar="30s", help="how long to stay with it (until it ends)")


def _simulate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "NAME is a process, or a Simulation that has everything else too. Each seed is a world of its own, with "
        "crashes, delays and an order of events that it draws. The first one that fails is shortened, told and drawn."
    )
    parser.add_argument("target", metavar="MODULE:NAME", type=_target, help="where it is, as in shop:checkout")
    parser.add_argument("--seeds", type=_count, default=200, metavar="N", help="how many worlds (%(default)s)")
    parser.add_argument("--first", type=_number, default=0, metavar="N", help="the first seed (%(default)s)")
    parser.add_argument("--seed", type=_number, metavar="N", help="only this world")
    parser.add_argument("--steps", type=_count, default=2_000, metavar="N", help="until faults end (%(default)s)")
    parser.add_argument("--faults", metavar="LIST", help="kinds or names, with commas; none for no fault (all)")
    parser.add_argument("--start", type=_value, metavar="JSON", help="what the process takes, or a list of such")
    parser.add_argument("--instances", type=_count, metavar="N", help="how many in each world")
    parser.add_argument("--messages", type=_value, metavar="JSON", help="payloads by the names of awaited messages")
    parser.add_argument("--stand-ins", metavar="MODULE", help="whose functions play the tasks of the same names")
    parser.add_argument("--invariants", metavar="MODULE:NAME,...", help="functions that say what must hold")
    parser.add_argument("--strikes", type=_number, metavar="N", help="how often faults strike before they end")
    parser.add_argument("--only", metavar="ID,...", help="only these instances")
    parser.add_argument("--calm", action="store_true", help="everything in the order in which it becomes possible")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="processes at once (%(default)s)")
    parser.add_argument("--keep-on", action="store_true", help="do not stop at the first world that fails")
    parser.add_argument("--last", type=_count, default=50, metavar="N", help="moments that are told (%(default)s)")
    parser.add_argument("--html", metavar="FILE", help="where to draw the failure (simulation-SEED.html)")


def _list(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A running instance is shown as stuck while it has an open incident (--incident lists those), and as waiting "
        "while nothing in it moves."
    )
    _db(parser)
    parser.add_argument(
        "--status", default="", choices=[s.value for s in Status], metavar="STATUS", help=_names(Status)
    )
    parser.add_argument(
        "--outcome", default="", choices=[o.value for o in Outcome], metavar="HOW", help=_names(Outcome)
    )
    parser.add_argument("--process", default="", metavar="NAME")
    parser.add_argument("--open", action="store_true", help="only those that have not ended")
    parser.add_argument("--incident", action="store_true", help="only those that wait for an operator")
    parser.add_argument("--tag", type=_tag, metavar="NAME=VALUE")
    parser.add_argument("--text", default="", help="a part of the id or the title")
    parser.add_argument("--limit", type=_count, default=50, metavar="N", help="at most so many (%(default)s)")
    parser.add_argument("--before", type=_count, metavar="CURSOR", help="go on where a longer list was cut")


def _show(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    parser.add_argument("--at", type=_count, metavar="N", help="as it was after its commit N")


def _history(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    parser.add_argument("--limit", type=_count, metavar="N", help="only the newest N commits")


def _send(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    _message(parser)


def _publish(parser: argparse.ArgumentParser) -> None:
    _db(parser)
    _message(parser)


def _message(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", metavar="MESSAGE", help="the message's name")
    parser.add_argument("--payload", type=_value, metavar="JSON", help="what it carries")
    parser.add_argument("--key", help="the correlation key")
    parser.add_argument("--ttl", type=_duration, metavar="1h", help="how long it is kept if nobody waits for it")
    _signed(parser)


def _cancel(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    parser.add_argument("--reason", default="", metavar="TEXT")
    parser.add_argument("--no-undo", action="store_true", help="end it at once, and undo nothing")
    _signed(parser)


def _plain(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    _signed(parser)


def _resolve(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    parser.add_argument("incident", nargs="?", type=_count, default=0, metavar="INCIDENT", help="if several are open")
    _signed(parser)


def _skip(parser: argparse.ArgumentParser) -> None:
    _resolve(parser)
    parser.add_argument("--result", type=_value, metavar="JSON", help="what the step would have given")
    parser.add_argument("--to", default="", metavar="NODE", help="where a choice is to go")


def _migrate(parser: argparse.ArgumentParser) -> None:
    _db(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _signed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--request-key", default="", metavar="KEY", help="a repetition under the same key does nothing")
    parser.add_argument("--by", metavar="WHO", help="who orders it, for the history (your login name)")


_COMMANDS: Final[tuple[tuple[str, str, str, Add], ...]] = (
    ("demo", DEMO, "watch a service being killed, and its orders arriving all the same", _nothing),
    ("run", "running:run", "start one instance and stay with it until it ends", _run),
    ("simulate", "simulate:simulate", "play a process in many worlds, with crashes in every place", _simulate),
    ("list", "reading:show_list", "list instances, the newest first", _list),
    ("show", "reading:show_one", "show an instance: state, tokens, waits, variables, incidents", _show),
    ("history", "reading:show_history", "show what happened to an instance, commit by commit", _history),
    ("explain", "reading:show_explanation", "say why an instance is where it is, and what moves it", _one),
    ("send", "changing:send", "send a message to an instance", _send),
    ("publish", "changing:publish", "publish a message for whichever instance waits for it", _publish),
    ("cancel", "changing:cancel", "cancel an instance, undoing what its sagas have done", _cancel),
    ("pause", "changing:pause", "let nothing new begin in an instance", _plain),
    ("resume", "changing:resume", "let a paused instance go on", _plain),
    ("retry", "changing:retry", "try again what an incident has stopped", _resolve),
    ("skip", "changing:skip", "go on as if the stopped step had been done", _skip),
    ("fail", "changing:fail", "give the stopped step up: undo, and fail", _resolve),
    ("audit", "keeping:check_all", "check that every instance is what its history says", _db),
    ("doctor", "keeping:examine_file", "check the file and what surrounds it", _db),
    ("migrate", "keeping:bring_up_to_date", "bring the database to the schema of this version", _migrate),
)


def _names(states: type[Status] | type[Outcome]) -> str:
    return ", ".join(state.value for state in states)


# --- values -----------------------------------------------------------------------------------------------------------


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); a text needs quotes: '\"text\"'") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _duration(text: str) -> str:
    from understudy.model.durations import duration_ms
    from understudy.model.errors import Rejected

    try:
        duration_ms(text)
    except Rejected as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _number(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _tag(text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not (name and is_pair):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _target(text: str) -> tuple[str, str]:
    module, _, name = text.partition(":")
    if not (module and name) or module.endswith(".py") or "/" in module:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MODULE:PROCESS, as in shop:order for shop.py")
    return module, name
