"""Command-line options that several tools take."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FIXTURES = ROOT / "fixtures"
POLICIES = (
    "none",
    "full",
    "selective",
    "submodule",
    "full --every 2",
    "full --first 1",
    "group:2",
    "parts:core-attn",
)
"""One policy of each kind, with the options that belong to it."""
REFERENCE_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ckpt-opt-reference"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def with_binary(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the option `--ckpt-opt`."""
    made = parser(doc)
    add_binary(made)
    return made


def add_binary(to: argparse.ArgumentParser) -> None:
    to.add_argument("--ckpt-opt", type=binary, required=True, metavar="BINARY", help="the ckpt-opt binary")


def binary(text: str) -> Path:
    """Parses the path of a file that exists."""
    path = Path(text).resolve()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such binary: {text}")
    return path


def add_counts(to: argparse.ArgumentParser, **defaults: int) -> None:
    """Adds one integer option for each keyword."""
    for name, default in defaults.items():
        to.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"[default: {default}]")


def add_cases(to: argparse.ArgumentParser, *, corpus: Path | None = None, files: str = "") -> None:
    """Adds the options that choose files of a corpus; without a default corpus, `--corpus` is required."""
    to.add_argument("--corpus", type=Path, default=corpus, required=corpus is None, help="folder of cases")
    to.add_argument("--case", type=words, default=[], help="comma-separated case names")
    to.add_argument("--file", type=words, default=words(files), help="comma-separated model file names, or all")


def add_cache(to: argparse.ArgumentParser) -> None:
    to.add_argument("--cache", type=Path, default=REFERENCE_CACHE, help="folder for gradients computed with PyTorch")


def add_page(to: argparse.ArgumentParser) -> None:
    to.add_argument("--page", type=Path, metavar="FILE", help="write the table as Markdown")


def words(text: str) -> list[str]:
    """Parses a comma-separated list; empty words are dropped."""
    return [word for word in text.split(",") if word]


def words_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Returns a parser of comma-separated lists of known words."""

    def parse(text: str) -> list[str]:
        names = words(text)
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected {', '.join(known)}")
        return names

    return parse


def split_at_dashes() -> tuple[list[str], list[str] | None]:
    """Returns the command line before `--`, and after it; `None` without `--`."""
    arguments = sys.argv[1:]
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def dim_options(sizes: dict[str, int]) -> list[str]:
    """Returns the options that bind symbolic sizes."""
    return [word for name, size in sizes.items() for word in ("--dim", f"{name}={size}")]


def parse_dims(dims: list[str]) -> dict[str, int]:
    """Parses values of `--dim`, such as `batch=4`."""
    return {name: int(size) for name, _, size in (dim.partition("=") for dim in dims)}


@contextlib.contextmanager
def folder_or_scratch(given: Path | None) -> Iterator[Path]:
    """Yields the folder that the user gave, which stays, or a temporary one."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = given or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
