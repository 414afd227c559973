#!/usr/bin/env python3
"""What a planned step takes more than the unplanned one: predicted by the plan, measured by runs in turns.

    python tools/overhead.py --ckpt-opt BINARY MODEL [--loss causal-lm] [--dim batch=2 …] [--budgets 50%,…] [--threads 2]
        [--steps 3] [--rounds 6] [--most-seconds 180] [--by time|cpu] [--folder DIR]
        [--options="--drop-output logits"]

Plans rest on what `calibrate` has measured of the device and `profile` of the model's nodes. A budget that nothing fits
into is the smallest that can be. Every planned run stands between two unplanned ones and is compared with their mean, so
that a machine that grows slower meanwhile makes no difference; a run's figure is the median of its steps but the first,
in which pages are fresh. What is known of the overhead is an interval: the median of the rounds lies in it 19 times of 20,
whatever the distribution of the noise (order statistics of the sign test). Rounds go on until every plan is decided or the
time is over:

    holds       the whole interval is within 3 points of what was predicted
    differs     the whole interval is further off
    undecided   the noise is too large to tell

`--by` says what decides: the time that passes, or processor time, which other load on the machine disturbs less, but
which counts a thread that waits for another as busy. Exit 1 if a plan differs or is undecided.

step_time.py does the same as part of its comparison.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from compiler import Compiler

POINTS = 3.0
"""Predicted and measured overhead may be so far apart, in percent of the unplanned step."""
LEAST_ROUNDS = 6
"""Fewer cannot tell the median with a confidence of 95 %."""
KINDS = ("time", "cpu")
BY_TIME, BY_CPU = range(len(KINDS))

Took = tuple[float, float]
"""What a step of a run took: microseconds that passed and of all processors."""


def warm(report: dict) -> Took:
    """The median step of a run, without its first."""
    steps = report["steps"][1:] or report["steps"]
    return statistics.median(s["time_us"] for s in steps), statistics.median(s["cpu_us"] for s in steps)


def interval(samples: list[float]) -> tuple[float, float]:
    """Where the median of what was sampled lies, with a confidence of 95 %, or from least to largest with fewer than six."""
    ordered, n = sorted(samples), len(samples)
    out = 0
    while 2 * sum(math.comb(n, i) for i in range(out + 2)) <= 0.05 * 2**n:
        out += 1
    return ordered[out], ordered[n - 1 - out]


@dataclass
class Overhead:
    """Of one plan."""

    predicted_pct: float
    measured_pct: list[Took] = field(default_factory=list)
    """A round each, by time that passed and by processor time."""

    def bounds(self, kind: int) -> tuple[float, float]:
        return interval([each[kind] for each in self.measured_pct])

    def median(self, kind: int) -> float:
        return statistics.median(each[kind] for each in self.measured_pct)

    def verdict(self, kind: int) -> str:
        low, high = (bound - self.predicted_pct for bound in self.bounds(kind))
        if -POINTS <= low and high <= POINTS:
            return "holds" if len(self.measured_pct) >= LEAST_ROUNDS else "undecided"
        return "differs" if low > POINTS or high < -POINTS else "undecided"

    def line(self, kind: int) -> str:
        by = [
            f"{self.median(k):.1f} % in {what} ({self.bounds(k)[0]:.1f} to {self.bounds(k)[1]:.1f})"
            for k, what in ((BY_TIME, "time"), (BY_CPU, "CPU time"))
        ]
        return (
            f"overhead: {self.predicted_pct:.1f} % predicted, measured {by[0]}, {by[1]}, {len(self.measured_pct)} rounds: "
            f"{self.verdict(kind)} by {('time', 'CPU time')[kind]}"
        )


@dataclass
class Noise:
    """How far unplanned runs in a row lie apart."""

    plain: list[Took] = field(default_factory=list)

    def line(self) -> str:
        apart = [
            statistics.median(100 * abs(b[kind] / a[kind] - 1) for a, b in pairwise(self.plain))
            for kind in (0, 1)
        ]
        return (
            f"noise: one unplanned run and the next are {apart[0]:.1f} % apart in time, {apart[1]:.1f} % in CPU time, "
            f"the median of {len(self.plain) - 1} pairs"
        )


def measure(
    plain: Callable[[], Took],
    planned: dict[str, tuple[float, Callable[[], Took]]],
    kind: int,
    rounds: int,
    most_seconds: float,
) -> tuple[dict[str, Overhead], Noise]:
    """Runs in turns; `planned` is what was predicted of each plan, and its run. At least `rounds` rounds, more while a plan is
    undecided and there is time."""
    found = {label: Overhead(predicted_pct) for label, (predicted_pct, _) in planned.items()}
    noise = Noise([plain()])
    started = time.monotonic()
    done = 0
    while True:
        for label, (_, run) in planned.items():
            took = run()
            before = noise.plain[-1]
            noise.plain.append(plain())
            after = noise.plain[-1]
            more = tuple(100 * (2 * took[k] / (before[k] + after[k]) - 1) for k in (0, 1))
            found[label].measured_pct.append((more[0], more[1]))
        done += 1
        is_open = any(each.verdict(kind) == "undecided" for each in found.values())
        passed = time.monotonic() - started
        if done >= rounds and (not is_open or passed * (done + 1) / done > most_seconds):
            return found, noise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--loss")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--budgets", default="50%")
    for option, default in (("threads", 2), ("steps", 3), ("rounds", LEAST_ROUNDS)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--most-seconds", type=float, default=180.0)
    parser.add_argument("--by", choices=KINDS, default=KINDS[0])
    parser.add_argument("--folder", type=Path, help="keep what is made here, and take the device's profile from here")
    parser.add_argument("--options", type=shlex.split, default=[], help="of `optimize`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        return compare(arguments, folder)


def compare(arguments: argparse.Namespace, folder: Path) -> int:
    compiler = Compiler(arguments.ckpt_opt.resolve(), 7200.0, tuple(arguments.options))
    threads = ("--threads", str(arguments.threads))
    device, times = folder / f"device-cpu-{arguments.threads}.json", folder / "times.json"
    if not device.exists():
        compiler.call("calibrate", "-o", device, *threads)
    sizes = {dim: int(size) for dim, _, size in (word.partition("=") for word in arguments.dim)}
    bound = [word for dim in arguments.dim for word in ("--dim", dim)]
    loss = ("--loss", arguments.loss) if arguments.loss else ()
    compiler.call("profile", arguments.model, "-o", times, *loss, *bound, *threads, *compiler.options)

    def run(path: Path) -> Callable[[], Took]:
        steps = str(arguments.steps + 1)
        return lambda: warm(compiler.call_json("run", path, "--seed", "1", *bound, *threads, "--steps", steps))

    plain = folder / "plain.onnx"
    compiler.optimize(arguments.model, plain, "none", arguments.loss, sizes)
    budgeted = Compiler(
        compiler.binary, compiler.timeout_s,
        (*compiler.options, "--device-profile", str(device), "--profile", str(times)),
    )  # fmt: skip
    planned = {}
    for budget in arguments.budgets.split(","):
        path = folder / f"planned-{budget.rstrip('%')}.onnx"
        report = budgeted.optimize(arguments.model, path, f"budget:{budget}", arguments.loss, sizes)
        planned[f"{budget}, {report['budget_bytes']} bytes"] = (report["overhead_pct"], run(path))
    kind = KINDS.index(arguments.by)
    found, noise = measure(run(plain), planned, kind, arguments.rounds, arguments.most_seconds)
    for label, overhead in found.items():
        print(f"{arguments.model.name} within {label}: {overhead.line(kind)}")
    print(noise.line())
    return 0 if all(each.verdict(kind) == "holds" for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
