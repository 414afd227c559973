"""Runs every model under every policy and ten budgets, and compares measured peaks with predicted ones.

    python tools budgets --ckpt-opt BINARY [--corpus DIR] [--case a,b] [--file onnx18.onnx,…|first|all]
        [--dim batch=4 …] [--policies none,full,…] [--budgets 10] [--effort first] [--bits] [--page FILE.md]

Without --corpus the fixtures are used, .pt2 and .pt programs like ONNX files. A .pt file takes the types of its inputs
from the .npz beside it. Budgets are spread evenly between the smallest feasible peak and the unplanned peak. For each
policy and budget the model is optimized, and the written file is run on random inputs. Policies that need layers are left
out for models without layers. A plan fails if

  planned    its peak exceeds the budget
  predicted  the runtime predicts another peak for the file than the plan states
  measured   the measured peak exceeds the budget or differs from the predicted one; where sizes depend on data, if it
             exceeds the predicted one
  gap        a larger budget costs more than a smaller one
  bits       with --bits: outputs with or without an arena, at 1 or 2 threads, differ from those of the first plan at the
             same number of threads

A model fails if its smallest budget is refused. Each row shows the worst of a model's budgets. --dim binds sizes that a
model has; other sizes take the binary's defaults. (`--dim s77=3`: fixtures/exported/inplace.pt2 writes to rows that a
batch of 1 lacks.) Exit code 0 if nothing fails, else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tools.lib import options
from tools.lib.compiler import Compiler, Refused, missing_inputs, sha256_of
from tools.lib.reference import find_models

WITHOUT_LAYERS = "needs layers, and no repeated layers were found"


@dataclass
class Row:
    model: str
    ops: int = 0
    smallest_bytes: int = 0
    unplanned_bytes: int = 0
    plans: int = 0
    left_out: int = 0
    """Policies that need layers, for a model without layers."""
    largest_overhead_pct: float = 0.0
    largest_gap_pct: float = 0.0
    over_budget: float = -1.0
    """Measured over budget, as a share; negative is below."""
    off: float = 0.0
    workspace_bytes: int = 0
    """What libraries keep beside the peak; it depends on the machine and the number of threads."""
    failures: list[str] = field(default_factory=list)


def sweep(compiler: Compiler, name: str, model: Path, args: argparse.Namespace) -> Row:
    row = Row(name)
    named = compiler.call_json("inspect", model, *missing_inputs(model))["dims"]
    known = {d if isinstance(d, str) else d["name"] for d in named}
    dims = [part for d in args.dim if d.split("=")[0] in known for part in ("--dim", d)]
    dims += missing_inputs(model)
    plan = ["--effort", args.effort, *dims]
    ends = compiler.call_json("frontier", model, "--points", 2, *plan)
    row.ops, row.smallest_bytes, row.unplanned_bytes = (
        ends["ops"],
        ends["smallest_feasible_bytes"],
        ends["unplanned_bytes"],
    )
    width, last = row.unplanned_bytes - row.smallest_bytes, float("inf")
    sizes = options.dim_options(ends["dims"])
    goals = [("--policy", policy) for policy in args.policies]
    count = max(args.budgets - 1, 1)
    goals += [("--budget", str(row.smallest_bytes + width * i // count)) for i in range(args.budgets)]
    known_bits: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "planned.onnx"
        for kind, value in goals:
            at = f"{kind[2:]} {value}"
            try:
                # How hard to search is for budgets.
                report = compiler.call_json(
                    "optimize", model, "-o", out, kind, *value.split(), *(plan if kind == "--budget" else dims)
                )
                run = compiler.call_json("run", out, "--seed", 0, *sizes)
            except Refused as refused:
                if kind == "--policy" and WITHOUT_LAYERS in str(refused):
                    row.left_out += 1
                else:
                    row.failures.append(f"{at}: {refused}")
                continue
            row.plans += 1
            if args.bits:
                row.failures += [f"{at}: {wrong}" for wrong in bits(compiler, out, sizes, known_bits)]
            predicted, measured = run["predicted_peak_bytes"], run["measured_peak_bytes"]
            planned = report["peak_after_bytes"]
            row.workspace_bytes = max(row.workspace_bytes, run["workspace_bytes"] or 0)
            row.off = max(row.off, abs(measured - predicted) / predicted)
            if planned != predicted:
                row.failures.append(f"{at}: planned {planned}, predicted for the file {predicted}")
            if measured > predicted or (measured < predicted and not report["bounded_dims"]):
                row.failures.append(f"{at}: measured {measured}, predicted {predicted}")
            if kind == "--policy":
                continue
            budget = int(value)
            row.over_budget = max(row.over_budget, measured / budget - 1)
            row.largest_gap_pct = max(row.largest_gap_pct, report["gap_pct"])
            row.largest_overhead_pct = max(row.largest_overhead_pct, report["overhead_pct"])
            if max(planned, measured) > budget:
                row.failures.append(f"{at}: planned {planned}, measured {measured}")
            if args.effort != "first" and report["overhead_pct"] > last + 1e-9:
                row.failures.append(f"{at}: costs {report['overhead_pct']:.4f} %, less memory cost {last:.4f} %")
            last = report["overhead_pct"]
    return row


def bits(compiler: Compiler, model: Path, sizes: list[str], known: dict[int, str]) -> list[str]:
    """Returns differences between the outputs and the known ones at the same number of threads. The first outputs
    become the known ones.
    """
    wrong = []
    outputs = model.with_name("outputs.safetensors")
    for threads in (1, 2):
        for arena in ("on", "off"):
            compiler.call(
                "run", model, "--seed", 0, *sizes, "--threads", threads, "--arena", arena, "--outputs", outputs
            )
            digest = sha256_of(outputs)
            if digest != known.setdefault(threads, digest):
                wrong.append(f"other bits at {threads} threads{' without an arena' if arena == 'off' else ''}")
    return wrong


HEADS = (
    "model", "ops", "smallest", "unplanned", "plans", "largest overhead", "largest gap", "measured over budget",
    "measured off predicted", "libraries beside it", "failures",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    return [
        row.model, str(row.ops), str(row.smallest_bytes), str(row.unplanned_bytes), str(row.plans),
        f"{row.largest_overhead_pct:.2f} %", f"{row.largest_gap_pct:.2f} %", f"{100 * row.over_budget:+.3f} %",
        f"{100 * row.off:.3f} %", str(row.workspace_bytes), str(len(row.failures)),
    ]  # fmt: skip


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_cases(parser, corpus=options.FIXTURES, files="all")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--policies", type=options.words, default=list(options.POLICIES))
    options.add_counts(parser, budgets=10)
    parser.add_argument("--effort", default="first")
    parser.add_argument("--bits", action="store_true")
    options.add_page(parser)
    args = parser.parse_args()
    compiler = Compiler(args.ckpt_opt)
    rows = []
    for name, model in find_models(args.corpus, args.case, args.file):
        try:
            row = sweep(compiler, name, model, args)
        except Refused as refused:
            row = Row(name, failures=[str(refused)])
        rows.append(row)
        print("  ".join(cells(row)), *row.failures, sep="\n    ", file=sys.stderr, flush=True)
    failed = [row for row in rows if row.failures]
    count, left_out = sum(row.plans for row in rows), sum(row.left_out for row in rows)
    failures = sum(len(row.failures) for row in rows)
    lines = [
        f"{len(rows)} models, {count} plans run, {left_out} policies left out for want of layers, {failures} failures",
        "",
    ]
    lines += ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    lines += [""] + [f"{row.model}: {failure}" for row in failed for failure in row.failures]
    text = "\n".join(lines).rstrip() + "\n"
    if args.page is None:
        print(text)
    else:
        args.page.write_text(f"# Plans within budgets\n\nMade by `python tools budgets`.\n\n{text}")
    return 1 if failed or not rows else 0
