"""Measured rows in a file, one JSON object a line, so that a run that was cut goes on where it stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def add_option(to: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds the option `--results`."""
    to.add_argument(
        "--results", type=Path, required=required, metavar="FILE.jsonl", help="keep rows here, and measure others only"
    )


def read(path: Path | None) -> list[Row]:
    """Returns the rows of a file, of which there are none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def append(path: Path | None, rows: Iterable[Row]) -> None:
    """Appends rows to a file, if one was given."""
    if path:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
