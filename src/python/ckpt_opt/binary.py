"""Finds and runs the `ckpt-opt` command that is installed with this package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

VARIABLE = "CKPT_OPT_BIN"


class CommandError(RuntimeError):
    """The command refused what it was given. `answer` is what it says of it, with `error` as the kind of the error."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__("\n".join(str(answer[key]) for key in ("message", "help") if key in answer))
        self.answer = answer


def executable() -> Path:
    """Returns the command: the one that `CKPT_OPT_BIN` names, that of this environment, or one on the path."""
    name = "ckpt-opt"
    if given := os.environ.get(VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{VARIABLE} names {given}, which is no file")
        return Path(given)
    for scheme in (None, f"{os.name}_user"):
        folder = sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    if found := shutil.which(name):
        return Path(found)
    raise FileNotFoundError(
        f"the command `{name}` is neither in this environment nor on the path: install it again "
        f"(pip install --force-reinstall ckpt-opt), or set {VARIABLE} to it"
    )


def call(*words: str | Path) -> dict[str, Any]:
    """Runs the command with `--format json` and returns what it prints; raises `CommandError` if it refuses.

    On a terminal, the command shows its progress there.
    """
    shown = None if os.isatty(2) else subprocess.PIPE
    run = subprocess.run([executable(), *words, "--format", "json"], stdout=subprocess.PIPE, stderr=shown, text=True)
    try:
        answer = json.loads(run.stdout if run.returncode == 0 else run.stdout or run.stderr or "")
    except json.JSONDecodeError:
        said = (run.stderr or run.stdout or "").strip()
        message = f"ckpt-opt ended with exit code {run.returncode} and said: {said[:2000]}"
        raise CommandError({"error": "command", "message": message}) from None
    if run.returncode:
        raise CommandError(answer)
    return dict(answer)
