"""Options that several of the tools take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def listed(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of argument: some of the known words, with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if strange := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(strange)}: expected {', '.join(known)}")
        return names

    return parse
