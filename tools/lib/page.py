"""Writes pages of figures: where they were measured, a table, notes, and failures."""

from __future__ import annotations

import datetime
import os
from pathlib import Path


def head(place: str, threads: int, *more: str) -> str:
    """Returns the line above a table: date, machine, threads, and other conditions of the figures."""
    return ", ".join([str(datetime.date.today()), place, f"{threads} of {os.cpu_count()} threads", *more])


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} at the start"


def finish(title: str, lines: list[str], notes: list[str], wrong: list[str], page: Path | None) -> int:
    """Prints the notes after the lines, which are printed already, writes all of it, and returns the exit code."""
    tail = ["", *(f"- {note}" for note in notes)]
    if wrong:
        tail += ["", "Wrong:", "", *(f"- {line}" for line in wrong)]
    print("\n".join(tail))
    if page:
        page.write_text("\n".join([f"# {title}", "", *lines, *tail, ""]))
    return 1 if wrong else 0
