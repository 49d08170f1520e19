"""How figures are taken: every variant in a process of its own, all of them once in each round, ratios within a
round.

A single number on a shared machine says little; a ratio of two numbers of the same minute says something, and its
spread over the rounds says how much. Figures land in `benchmarks/latest.json` under short stable names.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LATEST = Path(__file__).with_name("latest.json")
Sample = dict[str, float]


def child(script: str, variant: str, **options: Any) -> Sample:
    """Measure one variant in a fresh process; it prints one line of JSON last."""
    command = [sys.executable, script, "--child", variant, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{variant} failed:\n{done.stdout}\n{done.stderr}")
    sample: Sample = json.loads(done.stdout.strip().splitlines()[-1])
    return sample


def interleave(variants: dict[str, Callable[[], Sample]], rounds: int) -> list[dict[str, Sample]]:
    """Every variant once in each round, in another order each time."""
    order = list(variants)
    chance = random.Random(1)
    taken: list[dict[str, Sample]] = []
    for number in range(rounds):
        chance.shuffle(order)
        taken.append({name: variants[name]() for name in order})
        sys.stderr.write(f"\rround {number + 1} of {rounds}")
        sys.stderr.flush()
    sys.stderr.write("\n")
    return taken


def figure(values: Sequence[float], *, aim: float | None = None, at_most: bool = False) -> dict[str, Any]:
    """The median of the rounds, with its spread, and whether it meets its aim."""
    value = statistics.median(values)
    met = None if aim is None else (value <= aim if at_most else value >= aim)
    return {"value": value, "low": min(values), "high": max(values), "aim": aim, "met": met}


def ratio(rounds: list[dict[str, Sample]], over: str, under: str, *, of: str = "per_s") -> list[float]:
    return [taken[over][of] / taken[under][of] for taken in rounds]


def save(figures: dict[str, dict[str, Any]]) -> None:
    """Put the figures beside those of the other benchmarks."""
    kept: dict[str, Any] = json.loads(LATEST.read_text()) if LATEST.exists() else {}
    kept.update(figures)
    kept["machine"] = {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "commit": _commit(),
    }
    LATEST.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def show(title: str, figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for column in ("median", "low", "high", "aim"):
        table.add_column(column, justify="right")
    table.add_column("met")
    for name, given in figures.items():
        cells = [_text(given[column]) for column in ("value", "low", "high", "aim")]
        table.add_row(name, *cells, {True: "yes", False: "no", None: ""}[given["met"]])
    Console(width=110 if not sys.stdout.isatty() else None).print(table)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
