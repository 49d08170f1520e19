"""What actors tell each other, in words for a transcript."""

from __future__ import annotations

from understudy.actors.messages import (
    Arm,
    Committed,
    Forget,
    Load,
    NotCommitted,
    Order,
    Run,
    Sweep,
    Tick,
    Unsure,
    Write,
)
from understudy.model.commands import CompleteTask, Deliver, FailTask, FireTimer, Send
from understudy.store.commit import Commit


def describe(message: object) -> str:
    """One line."""
    if isinstance(message, Order):
        return f"order: {_command(message.command)}"
    if isinstance(message, Committed):
        return f"committed version {message.stored.version}"
    if isinstance(message, NotCommitted):
        return f"refused: {message.refused.reason}"
    if isinstance(message, Unsure):
        return f"unsure: {message.reason}"
    if isinstance(message, Write):
        change = message.change
        if isinstance(change, Commit):
            return f"write {change.id} version {change.stored.version + 1}"
        return f"write message {change.name}"
    if isinstance(message, Run):
        return f"run {type(message.operation).__name__}"
    if isinstance(message, Arm):
        return f"arm timer {message.wait} of {message.instance}"
    if isinstance(message, Tick):
        return f"tick {message.name}"
    if isinstance(message, Load):
        return f"load {message.id}"
    if isinstance(message, Forget):
        return f"forget {message.no}"
    if isinstance(message, Sweep):
        return f"sweep {'messages' if message.messages else 'runnable'} after {message.after}"
    return type(message).__name__.lower() if message is not None else "starts"


def _command(command: object) -> str:
    name = type(command).__name__
    if isinstance(command, CompleteTask):
        return f"{name} token {command.token} task {command.task} attempt {command.attempt}"
    if isinstance(command, FailTask):
        return f"{name} token {command.token} task {command.task} attempt {command.attempt}: {command.fault.message}"
    if isinstance(command, FireTimer):
        return f"{name} wait {command.wait}"
    if isinstance(command, Deliver):
        return f"{name} message {command.message} to wait {command.wait}"
    if isinstance(command, Send):
        return f"{name} {command.name} key {command.key or '-'}"
    return name
