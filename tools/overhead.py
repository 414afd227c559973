#!/usr/bin/env python3
"""What a planned step takes more than the unplanned one: predicted by the plan, measured step by step in turns.

    python tools/overhead.py --ckpt-opt BINARY MODEL [--loss causal-lm] [--dim batch=2 …] [--budgets 50%,…] [--threads 2]
        [--seconds 60] [--runs 9] [--by time|cpu] [--folder DIR] [--options="--drop-output logits"]

Plans rest on what `calibrate` has measured of the device and `profile` of the model's nodes, in `--runs` steps. A budget that
nothing fits into is the smallest that can be. `ckpt-opt overhead` then measures each plan for `--seconds`, which is settled
beforehand; what is known of the overhead is an interval, and with it

    holds       the whole interval is within 3 points of what was predicted
    differs     the whole interval is further off
    undecided   the noise is too large to tell

`--by` says what decides: the time that passes, or processor time, which other load on the machine disturbs less, but
which counts a thread that waits for another as busy. Exit 1 if a plan differs or is undecided.

step_time.py does the same as part of its comparison.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from compiler import Compiler

POINTS = 3.0
"""Predicted and measured overhead may be so far apart, in percent of the unplanned step."""
KINDS = ("time", "cpu")


@dataclass(frozen=True)
class Overhead:
    """Of one plan."""

    predicted_pct: float
    measured: dict
    """As `ckpt-opt overhead` says it."""

    def verdict(self, kind: str) -> str:
        low, high = (self.measured[kind][bound] - self.predicted_pct for bound in ("low_pct", "high_pct"))
        if -POINTS <= low and high <= POINTS:
            return "holds"
        return "differs" if low > POINTS or high < -POINTS else "undecided"

    def line(self, kind: str) -> str:
        by = [
            f"{more['pct']:.1f} % in {what} ({more['low_pct']:.1f} to {more['high_pct']:.1f})"
            for more, what in ((self.measured["time"], "time"), (self.measured["cpu"], "CPU time"))
        ]
        return (
            f"overhead: {self.predicted_pct:.1f} % predicted, measured {by[0]}, {by[1]}, {self.measured['pairs']} pairs of steps: "
            f"{self.verdict(kind)} by {kind}; unplanned steps after each other are {self.measured['noise_pct']:.1f} % apart"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--loss")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--budgets", default="50%")
    for option, default in (("threads", 2), ("seconds", 60), ("runs", 9)):
        parser.add_argument(f"--{option}", type=int, default=default)
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
    compiler.call(
        "profile", arguments.model, "-o", times, "--runs", str(arguments.runs), *loss, *bound, *threads, *compiler.options
    )
    plain = folder / "plain.onnx"
    compiler.optimize(arguments.model, plain, "none", arguments.loss, sizes)
    budgeted = Compiler(
        compiler.binary, compiler.timeout_s,
        (*compiler.options, "--device-profile", str(device), "--profile", str(times)),
    )  # fmt: skip
    verdicts = []
    for budget in arguments.budgets.split(","):
        path = folder / f"planned-{budget.rstrip('%')}.onnx"
        report = budgeted.optimize(arguments.model, path, f"budget:{budget}", arguments.loss, sizes)
        measured = compiler.call_json("overhead", plain, path, "--seconds", str(arguments.seconds), *bound, *threads)
        overhead = Overhead(report["overhead_pct"], measured)
        print(f"{arguments.model.name} within {budget}, {report['budget_bytes']} bytes: {overhead.line(arguments.by)}", flush=True)
        verdicts.append(overhead.verdict(arguments.by))
    return 0 if all(verdict == "holds" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
