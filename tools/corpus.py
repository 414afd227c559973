#!/usr/bin/env python3
"""Hold ckpt-opt against PyTorch, ONNX Runtime and itself, on the fixtures or on a corpus of exports.

    python tools/corpus.py --ckpt-opt target/release/ckpt-opt [--corpus DIR] [--case a,b] [--file onnx18.onnx]
        [--policies none,full,selective] [--losses auto] [--no-runtime] [--cache DIR] [--format human|json]

For every case and loss, `inspect` must list every parameter of PyTorch's by one of its names (row `names`). For every
policy the written file must
  write      be written (exit 0), with recompute nodes under every policy but `none`, and none under `none`
  checker    pass the ONNX checker: full check, strict shape inference
  ort        run in ONNX Runtime, unoptimised and optimised, with PyTorch's outputs, loss and full gradients
  ort-other  run there at another batch and sequence length too: outputs as of the model itself there, everything as in
             the unplanned file, and where PyTorch can compute gradients here, its outputs and gradients
and unless --no-runtime
  run        give the values of ONNX Runtime and of PyTorch in our runtime
  run-other  the same at the other size, against ONNX Runtime
  verify     be bit-equal to the unplanned file, both by `ckpt-opt verify` and by comparing two runs
  memory     at batch 8 x sequence 128 measure a peak within 2 % of the predicted one, and below that of `none`

Losses `auto`: vjp, the model's own scalar `loss` if it has one, and each loss whose gradients the case stores.
Exit 0 if all rows pass, 1 if one fails. Half-precision cases are skipped in ONNX Runtime, whose CPU provider lacks
the kernels, and judged against float64. Equality is defined in tolerance.py, references in reference.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort

import check_onnx
import tolerance
from compiler import Compiler, Refused, read_tensors, write_tensors
from feeds import COTANGENT, case_feeds, random_feeds, random_forward
from reference import (
    KINDS,
    LABELLED,
    Case,
    Reference,
    differentiate,
    find_cases,
    load_generator,
    reference,
    stored_reference,
)

OTHER = (3, 13)
MEMORY = (8, 128)
MEMORY_TOLERANCE = 0.02
LEVELS = {
    "unoptimised": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "optimised": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
Tensors = dict[str, np.ndarray]


@dataclass
class Row:
    case: str
    loss: str
    policy: str
    check: str
    status: str  # pass | fail | skip
    detail: str


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)

    def add(self, key: tuple[str, str, str], check: str, good: bool | None, detail: object = "") -> None:
        """`good` None: skipped. Progress goes to stderr, the table to stdout at the end."""
        row = Row(*key, check, {True: "pass", False: "fail", None: "skip"}[good], str(detail))
        self.rows.append(row)
        print(f"{row.status} {'/'.join(key)} {check}: {row.detail}", file=sys.stderr, flush=True)

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)


@dataclass
class Plan:
    """What is known of one (case, loss) while its policies are gone through."""

    case: Case
    loss: str
    truth: Reference
    table: list[dict]
    entries: dict[str, dict]
    folder: Path
    generator: ModuleType | None
    files: dict[str, Path] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    ort_other: dict[str, Tensors] = field(default_factory=dict)
    run_own: dict[str, Tensors] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        return self.truth.exact is not None

    @property
    def suffix(self) -> str:
        return ".safetensors" if self.half else ".npz"


def run_ort(model: Path, feeds: Tensors, level: ort.GraphOptimizationLevel) -> Tensors:
    """All outputs by name, on the CPU with two threads."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def entries_by_name(table: list[dict], truth: Reference) -> tuple[dict[str, dict], list[str]]:
    """The table's entry for each PyTorch parameter, under any name of either, and the parameters it does not have.

    A parameter whose gradient is zero may be absent: the graph does not use it.
    """
    known = {name: entry for entry in table for name in [entry["name"], *entry["aliases"]]}
    found, missing = {}, []
    for name, gradient in truth.full.items():
        names = [name, *(alias for alias, of in truth.aliases.items() if of == name)]
        entry = next((known[n] for n in names if n in known), None)
        if entry is not None:
            found[name] = entry
        elif np.any(gradient):
            missing.append(name)
    return found, missing


def gradients_by_name(outputs: Tensors, plan: Plan) -> Tensors:
    """Gradients under PyTorch's names and in PyTorch's layout, through the name table of `inspect`.

    Refused: a trainable parameter without a gradient output, a gradient output or a trainable parameter that PyTorch
    has no gradient for.
    """
    found, used = {}, set()
    for name, entry in plan.entries.items():
        output = f"{entry['initializer']}.grad"
        if output not in outputs:
            raise ValueError(f"no output {output} for the parameter {name}")
        used.add(output)
        found[name] = outputs[output].T if entry["transposed"] else outputs[output]
    strangers = {n for n in outputs if n.endswith(".grad")} - used
    strangers |= {f"{e['initializer']}.grad" for e in plan.table if e["trainable"]} - used
    if strangers:
        raise ValueError(f"gradients that PyTorch has no parameter for: {', '.join(sorted(strangers))}")
    return found


def against_torch(plan: Plan, outputs: Tensors, truth: Reference, forward: Tensors) -> list[tolerance.Worst]:
    """Outputs (against `forward`), loss and gradients against PyTorch; one verdict each."""
    verdicts = []
    try:
        grads = gradients_by_name(outputs, plan)
    except ValueError as error:
        return [tolerance.Worst(problem=str(error))]
    present = {name: truth.full[name] for name in grads}
    if plan.half:
        exact = {name: truth.exact[name] for name in present}
        return [tolerance.compare_half(grads, present, exact)]
    verdicts.append(tolerance.compare(outputs, forward))
    if truth.loss is not None:
        verdicts.append(tolerance.compare(outputs, {"loss": np.float32(truth.loss)}))
    verdicts.append(tolerance.compare(grads, present, tolerance.largest(present)))
    return verdicts


def against(got: Tensors, want: Tensors) -> list[tolerance.Worst]:
    """All outputs of two runtimes; gradients share the floor, other outputs have their own."""
    if set(got) != set(want):
        return [tolerance.Worst(problem=f"outputs differ: {sorted(set(got) ^ set(want))}")]
    grads = {name: value for name, value in want.items() if name.endswith(".grad")}
    rest = {name: value for name, value in want.items() if name not in grads}
    verdicts = [tolerance.compare(got, grads, tolerance.largest(grads))]
    return verdicts + ([tolerance.compare(got, rest)] if rest else [])


def verdict(report: Report, key: tuple[str, str, str], check: str, verdicts: list[tolerance.Worst]) -> None:
    """One row for several comparisons: it passes if all do, and shows the one that came nearest to failing."""
    bad = [v for v in verdicts if not v.agrees]
    shown = bad[0] if bad else max(verdicts, key=lambda v: v.ratio)
    report.add(key, check, not bad, shown)


def same_bits(a: Tensors, b: Tensors) -> str:
    """The first output whose bytes differ, or nothing."""
    for name in sorted(set(a) | set(b)):
        if name not in a or name not in b:
            return f"{name} is in one of the two only"
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape or a[name].tobytes() != b[name].tobytes():
            return f"{name} differs"
    return ""


def check_file(report: Report, key: tuple[str, str, str], out: Path, policy: str) -> None:
    """Rows `write` (recompute nodes are explicit) and `checker`."""
    nodes = onnx.load(out, load_external_data=False).graph.node
    copies = [n for n in nodes if any(p.key == "ckpt.role" and p.value == "recompute" for p in n.metadata_props)]
    unnamed = [n.name for n in copies if "/again" not in n.name]
    good = bool(copies) == (policy != "none") and not unnamed
    report.add(
        key,
        "write",
        good,
        f"{len(nodes)} nodes, {len(copies)} recompute" + (f", misnamed {unnamed[:3]}" if unnamed else ""),
    )
    problem = check_onnx.check(out)
    report.add(key, "checker", problem is None, problem or "full check, strict shape inference")


def check_ort(report: Report, plan: Plan, policy: str) -> Tensors | None:
    """Rows `ort` and `ort-other`; the unoptimised outputs at the case's own size."""
    key = (plan.case.name, plan.loss, policy)
    out, first = plan.files[policy], None
    if plan.half:
        report.add(key, "ort", None, "ONNX Runtime's CPU provider has no kernels for this dtype")
        return None
    feeds = case_feeds(plan.case, out)
    for level, value in LEVELS.items():
        outputs = run_ort(out, feeds, value)
        first = outputs if first is None else first
        verdict(report, key, f"ort {level}", against_torch(plan, outputs, plan.truth, plan.case.group("out")))
    forward, outputs = forward_at(plan.case, OTHER)
    feeds = random_feeds(plan.case, out, forward, outputs, 2)
    other = run_ort(out, feeds, LEVELS["unoptimised"])
    plan.ort_other[policy] = other
    verdicts = [tolerance.compare(other, outputs)]
    if "none" in plan.ort_other:
        verdicts += against(other, plan.ort_other["none"])
    if plan.generator is not None:
        cotangents = {n.removesuffix(COTANGENT): c for n, c in feeds.items() if n.endswith(COTANGENT)}
        found, truth = differentiate(plan.case, plan.loss, plan.generator, forward, cotangents, feeds.get("labels"))
        if plan.loss == "vjp":  # the sum of out·cot is no output of the graph
            truth = replace(truth, loss=None)
        verdicts += against_torch(plan, other, truth, found)
    verdict(report, key, "ort-other" if plan.generator is None else "ort-other vs torch", verdicts)
    return first


def forward_at(case: Case, size: tuple[int, int]) -> tuple[Tensors, Tensors]:
    """Random forward inputs at another size and what the original model makes of them."""
    forward = random_forward(case, *size, seed=1)
    return forward, run_ort(case.model, forward, LEVELS["unoptimised"])


def check_run(report: Report, compiler: Compiler, plan: Plan, policy: str, by_ort: Tensors | None) -> None:
    """Rows `run`, `run-other`, `verify`, `memory`."""
    key = (plan.case.name, plan.loss, policy)
    out, target = plan.files[policy], plan.folder / f"run-{policy}{plan.suffix}"
    inputs = plan.case.folder / "case.npz"
    if plan.half or (plan.loss in LABELLED and "labels" not in plan.case.arrays):
        inputs = plan.folder / f"own{plan.suffix}"
        write_tensors(inputs, case_feeds(plan.case, out))
    compiler.run(out, inputs, target)
    own = read_tensors(target)
    plan.run_own[policy] = own
    verdict(report, key, "run vs torch", against_torch(plan, own, plan.truth, plan.case.group("out")))
    if by_ort is not None:
        verdict(report, key, "run vs ort", against(own, by_ort))
    elif not plan.half:
        report.add(key, "run vs ort", None, "ONNX Runtime gave nothing to compare with")
    if policy != "none" and "none" in plan.run_own:
        difference = same_bits(plan.run_own["none"], own)
        try:
            compiler.verify(plan.files["none"], out)
        except Refused as error:
            difference = f"verify: {error}" + (f"; {difference}" if difference else "")
        report.add(key, "verify", not difference, difference or "bit-equal to none")
    if plan.half:
        return
    for size, check in ((OTHER, "run-other"), (MEMORY, "memory")):
        forward, outputs = forward_at(plan.case, size)
        inputs, target = plan.folder / f"{check}.npz", plan.folder / f"{check}-{policy}-out.npz"
        write_tensors(inputs, random_feeds(plan.case, out, forward, outputs, 2))
        answer = compiler.run(out, inputs, target)
        if check == "run-other" and policy not in plan.ort_other:
            report.add(key, check, None, "ONNX Runtime gave nothing to compare with")
        elif check == "run-other":
            verdict(report, key, check, against(read_tensors(target), plan.ort_other[policy]))
        else:
            check_memory(report, plan, policy, answer)


def check_memory(report: Report, plan: Plan, policy: str, answer: dict) -> None:
    """Row `memory`, from the figures of one run at batch 8 x sequence 128."""
    predicted, measured = answer["predicted_peak_bytes"], answer["measured_peak_bytes"]
    plan.peaks[policy] = measured
    off = abs(measured - predicted) / predicted
    good = off <= MEMORY_TOLERANCE
    detail = f"measured {measured}, predicted {predicted} ({100 * off:.2f} % off)"
    if policy != "none" and "none" in plan.peaks:
        good = good and measured < plan.peaks["none"]
        detail += f", {100 * measured / plan.peaks['none']:.1f} % of none"
    report.add((plan.case.name, plan.loss, policy), "memory", good, detail)


def losses_of(case: Case, chosen: str) -> list[str]:
    if chosen != "auto":
        return chosen.split(",")
    own = "loss" in case.group("out")
    stored = [kind for kind in KINDS if stored_reference(case, kind)]
    return [kind for kind in KINDS if kind in stored or kind == "vjp" or (kind == "own" and own)]


def check_case(
    report: Report, compiler: Compiler, case: Case, args: argparse.Namespace, generator, folder: Path
) -> None:
    """All losses and policies of one case. A failure of one row never hides the others."""
    try:
        table = compiler.inspect(case.model)["parameters"]
    except (Refused, KeyError) as error:
        report.add((case.name, "-", "-"), "inspect", False, repr(error))
        return
    for loss in losses_of(case, args.losses):
        try:
            truth = reference(case, loss, generator, args.cache)
        except Exception as error:
            report.add((case.name, loss, "-"), "reference", False, f"{type(error).__name__}: {error}")
            continue
        if truth is None:
            report.add(
                (case.name, loss, "-"), "reference", None, "no PyTorch gradients stored, and none can be computed here"
            )
            continue
        entries, missing = entries_by_name(table, truth)
        detail = f"{len(entries)} of PyTorch's parameters" + (f"; not listed: {', '.join(missing)}" if missing else "")
        report.add((case.name, loss, "-"), "names", not missing and bool(entries), detail)
        plan = Plan(case, loss, truth, table, entries, folder / f"{case.name}-{loss}", generator)
        plan.folder.mkdir(exist_ok=True)
        for policy in args.policies.split(","):
            key, out = (case.name, loss, policy), plan.folder / f"{policy}.onnx"
            stage = "write"
            try:
                compiler.optimize(case.model, out, policy, None if loss == "own" else loss)
                plan.files[policy] = out
                check_file(report, key, out, policy)
                stage = "ort"
                by_ort = check_ort(report, plan, policy)
            except Exception as error:  # whatever goes wrong is one failed row; the rest is still checked
                report.add(key, stage, False, f"{type(error).__name__}: {error}")
                by_ort = None
            if policy in plan.files and not args.no_runtime:
                try:
                    check_run(report, compiler, plan, policy, by_ort)
                except Exception as error:
                    report.add(key, "run", False, f"{type(error).__name__}: {error}")


def show(report: Report, fmt: str) -> None:
    counts = {status: report.count(status) for status in ("pass", "fail", "skip")}
    if fmt == "json":
        print(json.dumps({"rows": [asdict(row) for row in report.rows], "summary": counts}))
        return
    cells = [("case", "loss", "policy", "check", "status", "detail")]
    cells += [
        (r.case, r.loss, r.policy, r.check, r.status, r.detail.splitlines()[0] if r.detail else "") for r in report.rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    for row in cells:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[5]]))
    print(f"\n{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped")


def main() -> int:
    home = Path(__file__).resolve().parent.parent
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ckpt-opt-reference"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt-opt", type=Path, required=True, help="the binary")
    parser.add_argument(
        "--corpus", type=Path, default=home / "fixtures", help="folder of cases (default: the fixtures)"
    )
    parser.add_argument("--case", default="", help="comma-separated case names")
    parser.add_argument("--file", help="model file name (default: model.onnx, else onnx18.onnx)")
    parser.add_argument("--policies", default="none,full,selective")
    parser.add_argument("--losses", default="auto", help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--no-runtime", action="store_true", help="only what needs no libtorch")
    parser.add_argument("--cache", type=Path, default=cache, help="for gradients computed with PyTorch")
    parser.add_argument("--keep", type=Path, help="keep the written files in this folder")
    parser.add_argument("--format", choices=["human", "json"], default="human")
    args = parser.parse_args()
    if not args.ckpt_opt.is_file():
        parser.error(f"no such binary: {args.ckpt_opt}")
    if args.losses != "auto" and not set(args.losses.split(",")) <= set(KINDS):
        parser.error(f"--losses are {', '.join(KINDS)}")
    report, compiler = Report(), Compiler(args.ckpt_opt.resolve())
    cases = find_cases(args.corpus, [c for c in args.case.split(",") if c], args.file)
    generator = load_generator(args.corpus)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for case in cases:
            check_case(report, compiler, case, args, generator, folder)
    show(report, args.format)
    return 1 if report.count("fail") or not report.count("pass") else 0


if __name__ == "__main__":
    sys.exit(main())
