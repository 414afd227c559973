"""Measures the overhead of planned steps, beside what the plan predicts.

    python tools overhead --ckpt-opt BINARY MODEL [--loss causal-lm] [--dim batch=2 …] [--budgets 50%,…] [--threads 2]
        [--seconds 60] [--runs 9] [--by time|cpu] [--folder DIR] [--options="--drop-output logits"]

Plans use what `calibrate` measures of the device and `profile` of the model's nodes, in `--runs` steps. For a budget that
is too small, the smallest feasible one is used. `ckpt-opt overhead` then measures each plan for `--seconds`, planned and
unplanned steps in turns. It reports an interval for the overhead. The verdict is

    holds       the whole interval is within 3 points of the prediction
    differs     the whole interval is further off
    undecided   the noise is too large

`--by` chooses the time that decides: wall time, or CPU time. Other load disturbs CPU time less, but a thread that waits for
another counts as busy. Exit code 1 if a verdict is not `holds`. step_time.py includes the same measurement.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from tools.lib import options
from tools.lib.compiler import Compiler

POINTS = 3.0
"""Predicted and measured overhead may be so far apart, in percent of the unplanned step."""
KINDS = ("time", "cpu")


@dataclass(frozen=True)
class Overhead:
    """The overhead of one plan, predicted and measured."""

    predicted_pct: float
    measured: dict
    """As `ckpt-opt overhead` says it."""

    def verdict(self, kind: str) -> str:
        low, high = (self.measured[kind][bound] - self.predicted_pct for bound in ("low_pct", "high_pct"))
        if low >= -POINTS and high <= POINTS:
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
    parser = options.with_binary(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--loss")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--budgets", type=options.words, default=["50%"])
    options.add_counts(parser, threads=2, seconds=60, runs=9)
    parser.add_argument("--by", choices=KINDS, default=KINDS[0])
    parser.add_argument("--folder", type=Path, help="keep what is made here, and take the device's profile from here")
    parser.add_argument("--options", type=shlex.split, default=[], help="of `optimize`")
    arguments = parser.parse_args()
    with options.folder_or_scratch(arguments.folder) as folder:
        return compare(arguments, folder)


def compare(arguments: argparse.Namespace, folder: Path) -> int:
    compiler = Compiler(arguments.ckpt_opt, 7200.0, tuple(arguments.options))
    threads = ("--threads", str(arguments.threads))
    device, times = compiler.calibrated(folder, arguments.threads), folder / "times.json"
    sizes = options.parse_dims(arguments.dim)
    bound = options.dim_options(sizes)
    loss = ("--loss", arguments.loss) if arguments.loss else ()
    compiler.call(
        "profile",
        arguments.model,
        "-o",
        times,
        "--runs",
        str(arguments.runs),
        *loss,
        *bound,
        *threads,
        *compiler.options,
    )
    plain = folder / "plain.onnx"
    compiler.optimize(arguments.model, plain, "none", arguments.loss, sizes)
    budgeted = Compiler(
        compiler.binary, compiler.timeout_s,
        (*compiler.options, "--device-profile", str(device), "--profile", str(times)),
    )  # fmt: skip
    verdicts = []
    for budget in arguments.budgets:
        path = folder / f"planned-{budget.rstrip('%')}.onnx"
        report = budgeted.optimize(arguments.model, path, f"budget:{budget}", arguments.loss, sizes)
        measured = compiler.call_json("overhead", plain, path, "--seconds", str(arguments.seconds), *bound, *threads)
        overhead = Overhead(report["overhead_pct"], measured)
        print(
            f"{arguments.model.name} within {budget}, {report['budget_bytes']} bytes: {overhead.line(arguments.by)}",
            flush=True,
        )
        verdicts.append(overhead.verdict(arguments.by))
    return 0 if all(verdict == "holds" for verdict in verdicts) else 1
