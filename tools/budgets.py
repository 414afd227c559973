#!/usr/bin/env python3
"""Holds plans to their word: every model by every policy, and at ten budgets between the smallest feasible one and the
unplanned peak.

    python tools/budgets.py --ckpt-opt target/release/ckpt-opt [--corpus DIR] [--case a,b] [--file onnx18.onnx,…|first|all]
        [--dim batch=4 …] [--policies none,full,…] [--budgets 10] [--effort first] [--bits] [--out FILE.md]

Without --corpus the fixtures are taken. Programs of PyTorch's (.pt2, .pt) are swept like ONNX files; what a .pt does not
tell of its inputs is taken from the .npz beside it. For each policy and budget the model is optimised, and the written
file is run on random inputs. A policy of layers is left out where a model has none. It fails if
  planned    the plan's peak is over the budget
  predicted  the runtime predicts another peak for the file than the plan says
  measured   the peak that was measured is over the budget, or another than was predicted; where sizes depend on data,
             more than was predicted
  gap        a larger budget costs more than a smaller one
  bits       with --bits: outputs, with an arena and without, at 1 thread and at 2, are not those of the first plan at as
             many threads
and a model fails if its smallest budget is refused. Each row shows the worst of a model's budgets. --dim binds sizes that
a model has (`--dim s77=3`: fixtures/exported/inplace.pt2 writes to rows that a batch of 1 lacks); the others are those the
binary assumes.

Exit 0 if nothing fails, 1 else.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from compiler import Compiler, Refused

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
WITHOUT_LAYERS = "needs layers, and no repeated layers were found"
SUFFIXES = (".onnx", ".pt2", ".pt")
POLICIES = "none,full,selective,submodule,every:2,first:1,group:2,parts:core-attn"


@dataclass
class Row:
    model: str
    ops: int = 0
    smallest_bytes: int = 0
    unplanned_bytes: int = 0
    plans: int = 0
    left_out: int = 0
    """Policies of layers, for a model that has none."""
    largest_overhead_pct: float = 0.0
    largest_gap_pct: float = 0.0
    over_budget: float = -1.0
    """Measured over budget, as a share; negative is below."""
    off: float = 0.0
    workspace_bytes: int = 0
    """What libraries keep beside the peak; it depends on the machine and the number of threads."""
    failures: list[str] = field(default_factory=list)


def models(args: argparse.Namespace) -> list[tuple[str, Path]]:
    found = []
    wanted = set(args.case.split(",")) if args.case else None
    for folder in sorted((args.corpus or FIXTURES).iterdir()):
        if not folder.is_dir() or (wanted is not None and folder.name not in wanted):
            continue
        files = sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES)
        if args.file == "first":
            files = files[:1]
        elif args.file != "all":
            files = [f for f in files if f.name in args.file.split(",")]
        found += [(f"{folder.name}/{file.name}", file) for file in files]
    return found


def told(model: Path) -> list[str | Path]:
    """What a TorchScript file does not tell: the types of its inputs, from the example that stands beside it."""
    if model.suffix != ".pt":
        return []
    own, common = model.with_suffix(".npz"), model.with_name("case.npz")
    return ["--inputs", own if own.is_file() else common]


def sweep(compiler: Compiler, name: str, model: Path, args: argparse.Namespace) -> Row:
    row = Row(name)
    named = compiler.call_json("inspect", model, *told(model))["dims"]
    known = {d if isinstance(d, str) else d["name"] for d in named}
    dims = [part for d in args.dim if d.split("=")[0] in known for part in ("--dim", d)]
    dims += told(model)
    plan = ["--effort", args.effort, *dims]
    ends = compiler.call_json("frontier", model, "--points", 2, *plan)
    row.ops, row.smallest_bytes, row.unplanned_bytes = ends["ops"], ends["smallest_feasible_bytes"], ends["unplanned_bytes"]
    width, last = row.unplanned_bytes - row.smallest_bytes, float("inf")
    sizes = [part for n, s in ends["dims"].items() for part in ("--dim", f"{n}={s}")]
    wishes = [("--policy", policy) for policy in args.policies.split(",") if policy]
    count = max(args.budgets - 1, 1)
    wishes += [("--budget", str(row.smallest_bytes + width * i // count)) for i in range(args.budgets)]
    known_bits: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "planned.onnx"
        for kind, wish in wishes:
            at = f"{kind[2:]} {wish}"
            try:
                # How hard to search is for budgets.
                report = compiler.call_json("optimize", model, "-o", out, kind, wish, *(plan if kind == "--budget" else dims))
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
            budget = int(wish)
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
    """Where outputs differ from what is known of them, by the number of threads; the first that come become known."""
    wrong = []
    outputs = model.with_name("outputs.safetensors")
    for threads in (1, 2):
        for arena in ((), ("--no-arena",)):
            compiler.call("run", model, "--seed", 0, *sizes, "--threads", threads, *arena, "--outputs", outputs)
            with outputs.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != known.setdefault(threads, digest):
                wrong.append(f"other bits at {threads} threads{' without an arena' if arena else ''}")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--case", default="")
    parser.add_argument("--file", default="all")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--effort", default="first")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compiler = Compiler(args.ckpt_opt.resolve())
    rows = []
    for name, model in models(args):
        try:
            row = sweep(compiler, name, model, args)
        except Refused as refused:
            row = Row(name, failures=[str(refused)])
        rows.append(row)
        print("  ".join(cells(row)), *row.failures, sep="\n    ", file=sys.stderr, flush=True)
    failed = [row for row in rows if row.failures]
    count, left_out = sum(row.plans for row in rows), sum(row.left_out for row in rows)
    failures = sum(len(row.failures) for row in rows)
    lines = [f"{len(rows)} models, {count} plans run, {left_out} policies left out for want of layers, {failures} failures", ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    lines += [""] + [f"{row.model}: {failure}" for row in failed for failure in row.failures]
    text = "\n".join(lines).rstrip() + "\n"
    if args.out is None:
        print(text)
    else:
        args.out.write_text(f"# What plans are worth\n\nMade by `tools/{Path(__file__).name}`.\n\n{text}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
