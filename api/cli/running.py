"""The commands that run instances in this very process: run and demo."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from understudy.cli import INTERRUPTED, documents, show
from understudy.cli.output import Output, styled
from understudy.cli.source import opened
from understudy.cli.standing import shell
from understudy.cli.words import MOVE, Narrator
from understudy.model.errors import Rejected, TimedOut, UnderstudyError
from understudy.process import Process
from understudy.runtime import Handle, Runtime
from understudy.state import State
from understudy.store.reads import Filter, Record


def run(arguments: Namespace, output: Output) -> int:
    # What modules and handlers print is not the result: beside a JSON document it would be noise.
    with contextlib.redirect_stdout(sys.stderr) if output.as_json else contextlib.nullcontext():
        process = _process(*arguments.target)
        _check_alone(arguments.db, process)
        with Runtime(arguments.db, process) as runtime:
            return _stay(_Watcher(runtime, _begin(runtime, process, arguments), arguments, output))


def _stay(watcher: _Watcher) -> int:
    try:
        return watcher.stay()
    except TimedOut:
        watcher.leave("TimedOut", "it is still on its way")
        return 1
    except KeyboardInterrupt:
        watcher.leave("Interrupted", "interrupted")
        return INTERRUPTED


def demo(arguments: Namespace, output: Output) -> int:
    """The demonstration has arguments of its own, which it explains itself."""
    from understudy.demo.play import main

    if not output.as_json:
        return main(arguments.rest)
    with contextlib.redirect_stdout(sys.stderr):
        code = main(arguments.rest)
    output.document({"exit_code": code})
    return code


class _Watcher:
    """Stays with an instance and says what happens to it."""

    def __init__(self, runtime: Runtime, handle: Handle[Any], arguments: Namespace, output: Output) -> None:
        self._runtime = runtime
        self._handle = handle
        self._arguments = arguments
        self._output = output
        self._narrator = Narrator()
        self._seen = 0
        self._hinted: set[int] = set()

    def stay(self) -> int:
        self._output.aside(styled(f"{self._handle.id} in {self._arguments.db}", "bold"))
        state = self._runtime.wait_until(self._handle.id, self._look, timeout=self._arguments.timeout)
        if self._output.as_json:
            self._output.document(documents.state_document(state))
        elif state.outcome in ("completed", "terminated"):
            self._output.say(styled(json.dumps(state.result, indent=2, ensure_ascii=False)))
        elif state.is_ended:
            self._output.error("Unsuccessful", str(state))
        else:
            self._say_stuck(state)
        return 0 if state.outcome in ("completed", "terminated") else 1

    def leave(self, kind: str, why: str) -> None:
        """Nothing is lost by leaving; say where it stands, and how to go on."""
        arguments, id_ = self._arguments, self._handle.id
        again = shell("understudy", "run", ":".join(arguments.target), "--db", arguments.db, "--id", id_)
        text = f"{why}; nothing is lost, everything up to commit {self._seen} is durable. Go on with: {again}"
        if self._output.as_json:
            self._output.document(
                {"error": {"kind": kind, "message": text}, "state": documents.state_document(self._handle.state)}
            )
        else:
            self._output.error(kind, text)

    def _look(self, state: State) -> bool:
        for told in show.told(self._news(), self._narrator):
            if told.line.tone != MOVE:
                self._output.aside(styled(f"{told.time}  "), show.toned(told.line))
            self._seen = max(self._seen, told.n)
        self._hint(state)
        return state.is_ended or bool(state.incidents)

    def _news(self) -> list[Record]:
        """The commits since the last look; how many there are by now is known only from them."""
        limit = 8
        while True:
            records = self._runtime.node.reads.history(self._handle.id, limit=limit)
            if records[0].n <= self._seen + 1:
                return [record for record in records if record.n > self._seen]
            limit *= 8

    def _hint(self, state: State) -> None:
        """Who waits for a message here cannot send it from this terminal."""
        for wait in state.waiting:
            if wait.kind == "message" and wait.token not in self._hinted:
                self._hinted.add(wait.token)
                command = shell("understudy", "send", self._arguments.db, state.id, wait.name)
                self._output.aside(styled(f"              from another terminal: {command}", "bold"))

    def _say_stuck(self, state: State) -> None:
        explain = shell("understudy", "explain", self._arguments.db, state.id)
        self._output.error("Stuck", f"{state}; what moves it: {explain}")


def _begin(runtime: Runtime, process: Process[Any, Any], arguments: Namespace) -> Handle[Any]:
    """An instance that exists is gone on with; its input need not be given again."""
    if arguments.id is not None and arguments.input is None:
        found = runtime.node.reads.find(arguments.id)
        if found is not None and found.process != process.name:
            raise Rejected(
                f"{arguments.id} is an instance of {found.process}, not of {process.name}; give another --id"
            )
        if found is not None:
            return runtime.get(arguments.id, process)
    return runtime.start(process, arguments.input, id=arguments.id)


def _check_alone(db: str, process: Process[Any, Any]) -> None:
    """Whoever opens a database runs all of it: instances whose handlers are not here would be stopped by incidents."""
    if not Path(db).is_file() or Path(db).stat().st_size == 0:
        return
    with opened(db) as source:
        if source.has_owner():
            return
        others = {name for _, name, _, _ in source.reads.definitions()} - {process.name}
        waiting = [name for name in sorted(others) if source.reads.page(Filter(process=name, open_only=True), limit=1)]
    if waiting:
        raise Rejected(
            f"{db} holds open instances of {', '.join(waiting)}, whose handlers are not in {process.name}; "
            "start the service that runs them first, or give another --db"
        )


def imported(module: str) -> Any:
    """A module of the user, from the working directory or from what is installed."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except UnderstudyError:
        raise
    except ModuleNotFoundError as error:
        missing = f"there is no module {error.name}" if error.name else str(error)
        raise Rejected(f"cannot import {module}: {missing}, neither here nor among what is installed") from error
    except Exception as error:
        raise Rejected(f"cannot import {module}: {type(error).__name__}: {error}") from error


def _process(module: str, name: str) -> Process[Any, Any]:
    found = imported(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Process):
        here = importlib.import_module(module)
        names = ", ".join(key for key, value in vars(here).items() if isinstance(value, Process)) or "none"
        raise Rejected(f"{module}:{name} is no process; the processes of {module} are: {names}")
    return found
