"""Checks that the installed PyTorch is one that this package was tested with."""

from __future__ import annotations

import re
import warnings
from importlib import metadata

OLDEST = (2, 9)
NEWEST = (2, 11)


def check_torch(name: str) -> None:
    """Raises `ImportError` if PyTorch is missing or older than `OLDEST`, and warns if it is newer than `NEWEST`.

    `name` is what was asked for; the message mentions it.
    """
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"ckpt_opt.{name} needs PyTorch {oldest} or later, and no PyTorch is installed here: pip install torch"
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    version = (int(numbers[1]), int(numbers[2])) if numbers else OLDEST
    if version < OLDEST:
        raise ImportError(
            f"ckpt_opt.{name} needs PyTorch {oldest} or later, and {found} is installed: pip install -U torch"
        )
    if version > NEWEST:
        warnings.warn(
            f"ckpt_opt was tested with PyTorch {oldest} to {newest}; {found} is newer, and its compiler may differ",
            stacklevel=3,
        )
