"""Runs steps as processes with time limits: none hides another, and all of it ends in time."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.cuda import records
from tools.cuda.records import Records

TOGETHER = "correctness"
"""The stage whose steps run beside each other."""
PROCESSES = 4
THREADS = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // PROCESSES))}
"""Threads on the CPU: those of processes beside each other would wait for each other's."""
CLOSING_S = 8.0
"""Seconds that are kept for the end of a run."""
LEAST_SHARE = 0.5
"""A step begins if this share of its limit is left."""
SAID_LETTERS = 4000
SKIP_CODE = 77


@dataclass(frozen=True)
class Step:
    name: str
    stage: str
    limit_s: int
    run: Callable


class Runner:
    """Runs steps; `command` runs the one that is named after it."""

    def __init__(self, command: list[str], out: Path, dry: bool, limit_s: float) -> None:
        self.command = command
        self.out = out
        self.dry = dry
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s - CLOSING_S

    def run(self, steps: list[Step]) -> None:
        for stage, group in itertools.groupby(steps, key=lambda s: s.stage):
            with ThreadPoolExecutor(PROCESSES if stage == TOGETHER else 1) as pool:
                list(pool.map(self.step, group))
            self.write_page()

    def write_page(self) -> None:
        (self.out / records.PAGE).write_text(records.page(records.read(self.out), self.dry))

    def step(self, step: Step) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s < LEAST_SHARE * step.limit_s:
            said = f"{max(0.0, left_s):.0f} s of {self.limit_s:.0f} s were left, less than half its limit"
            self.ended(step, records.DROPPED, 0.0, said)
            return
        begun = time.monotonic()
        limit_s = min(float(step.limit_s), left_s)
        process = subprocess.Popen(
            [*self.command, step.name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, errors="replace", env=os.environ | THREADS,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
            ended = {0: records.GOOD, SKIP_CODE: records.SKIPPED}.get(process.returncode, records.FAILED)
        except subprocess.TimeoutExpired:
            ended = records.LATE
            kill_group(process.pid)
            said, _ = process.communicate()
            said += f"\nstopped after {limit_s:.0f} s"
        finally:
            # Whatever it started ends with it.
            kill_group(process.pid)
        self.ended(step, ended, time.monotonic() - begun, said)

    def ended(self, step: Step, ended: str, seconds: float, said: str) -> None:
        Records(self.out, step.name).add(
            ended=ended, seconds=round(seconds, 1), limit_s=step.limit_s, said=said[-SAID_LETTERS:]
        )
        with (self.out / records.LOG).open("a") as log:
            log.write(f"== {step.name}: {ended}\n{said[-SAID_LETTERS:]}\n")
        last = "" if ended == records.GOOD else f": {records.last_line(said)}"
        print(f"{step.name}: {ended}, {seconds:.1f} s of {step.limit_s}{last}", flush=True)


def kill_group(process: int) -> None:
    """Ends a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def end_with_parent() -> None:
    """Has this process and all that it starts end when the one that started it ends (Linux)."""
    set_parent_death_signal = 1
    signal.signal(signal.SIGTERM, lambda *_: kill_group(os.getpgrp()))
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
