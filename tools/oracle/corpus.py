"""Compares ckpt-opt with PyTorch, ONNX Runtime and itself, on the fixtures or on a corpus of exports.

    python tools corpus --ckpt-opt BINARY [--corpus DIR] [--case a,b] [--file onnx18.onnx,…|all]
        [--fuse on|off|both] [--policies none,full,selective] [--losses auto] [--no-runtime] [--cache DIR]
        [--format human|json]

For every case and loss, the file must hold every parameter of PyTorch's (row `names`): under a name that `inspect` lists,
or with equal contents where the file has no name; see matching.py. For every policy the written file must
  write      be written (exit code 0), with recompute nodes under every policy except `none`, and without any under `none`
  checker    pass the ONNX checker: full check, strict shape inference
  back       be readable
  ort        give PyTorch's outputs, loss and full gradients in ONNX Runtime, unoptimised and optimised
  ort-other  run there at another batch and sequence length: the outputs are the model's own, everything equals the
             unplanned file, and where PyTorch can compute gradients here, its outputs and gradients
and unless --no-runtime
  run        give the values of ONNX Runtime and of PyTorch in our runtime
  run-other  the same at the other size, against ONNX Runtime
  verify     equal the unplanned file bit for bit, by `ckpt-opt verify` and by comparing two runs
  memory     at batch 8 x sequence 128, measure a peak that equals the predicted one, is at most 2 % smaller where data
             decides sizes, and is below that of `none`

A policy may be a budget, `budget:50%`; where nothing fits into it, the smallest feasible one. Plans are made for the sizes
at which memory is measured. A model in training mode (record.json says `train`) draws other masks in PyTorch: there our
runtime is compared with ONNX Runtime, which draws the masks of the written file.

Row `source` reports files that ONNX Runtime refuses as exported; they are compared with PyTorch's outputs. A file that runs
at its own size only, or whose position table is shorter, is checked at sizes at which it runs.

Losses `auto`: vjp, the model's own scalar `loss` if it has one, and each loss whose gradients the case stores.
Half-precision cases skip ONNX Runtime, whose CPU provider lacks the kernels, and are compared with float64. tolerance.py
defines equality, reference.py the references. Exit code 0 if all rows pass, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx

from tools.lib import matching, options, tolerance
from tools.lib.compiler import Compiler, Refused, read_tensors, write_tensors
from tools.lib.feeds import COTANGENT, case_feeds, random_feeds, random_forward, required_inputs
from tools.lib.onnx_runtime import OPTIMISED, UNOPTIMISED, run_ort
from tools.lib.reference import (
    KINDS,
    LABELLED,
    Case,
    Reference,
    contents,
    differentiate,
    find_cases,
    forward,
    load_generator,
    reference,
    stored_reference,
)
from tools.oracle import check_onnx

OTHER = (3, 13)
MEMORY = (8, 128)
VERIFIED = (1, 128)
"""The size that `verify` takes where nothing says otherwise."""
MEMORY_TOLERANCE = 0.02
RANDOM = "training mode: PyTorch draws other masks"
LEVELS = {
    "unoptimised": UNOPTIMISED,
    "optimised": OPTIMISED,
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
        """Adds a row; `good` None means skipped. Progress goes to stderr, the table to stdout at the end."""
        row = Row(*key, check, {True: "pass", False: "fail", None: "skip"}[good], str(detail))
        self.rows.append(row)
        print(f"{row.status} {'/'.join(key)} {check}: {row.detail}", file=sys.stderr, flush=True)

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)


class Unfit(Exception):
    """The exported model does not run at this size."""


@dataclass
class Source:
    """The exported file, as run by ONNX Runtime or else by PyTorch."""

    case: Case
    generator: ModuleType | None
    refused: str = ""
    """What ONNX Runtime says against the file at its own size."""
    at: dict[tuple[int, int], tuple[Tensors, Tensors] | Unfit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            run_ort(self.case.model, self.case.group("in"), UNOPTIMISED)
        except Exception as error:  # ONNX Runtime has a class for each kind of failure
            self.refused = first_line(error)

    def forward_at(self, size: tuple[int, int]) -> tuple[Tensors, Tensors]:
        """Returns random forward inputs at that size, and the model's outputs."""
        if size not in self.at:
            self.at[size] = self.run_at(size)
        answer = self.at[size]
        if isinstance(answer, Unfit):
            raise answer
        return answer

    def runs_at(self, size: tuple[int, int]) -> bool:
        try:
            return bool(self.forward_at(size))
        except Unfit:
            return False

    def run_at(self, size: tuple[int, int]) -> tuple[Tensors, Tensors] | Unfit:
        inputs = random_forward(self.case, *size, seed=1)
        try:
            if not self.refused:
                return inputs, run_ort(self.case.model, inputs, UNOPTIMISED)
            if self.generator is not None:
                return inputs, forward(self.case, self.generator, inputs)
        except Exception as error:
            return Unfit(first_line(error))
        return Unfit(self.refused)

    def forward_to_measure(self) -> tuple[Tensors, Tensors, str]:
        """Returns forward inputs and outputs at the largest size at which memory can be measured, and that size in
        words.
        """
        own = next(iter(self.case.group("in").values())).shape
        for size in (MEMORY, (MEMORY[0], own[1] if len(own) == 2 else 1)):
            try:
                return *self.forward_at(size), f"at {size[0]} x {size[1]}"
            except Unfit:
                continue
        return self.case.group("in"), self.case.group("out"), "at its own size"

    def measured_sizes(self) -> dict[str, int]:
        """Returns the named sizes of the inputs at which memory is measured; plans are made for these too."""
        inputs = self.forward_to_measure()[0]
        return {
            dim.dim_param: extent
            for name, kind in required_inputs(self.case.model).items()
            for dim, extent in zip(kind.shape.dim, inputs[name].shape)
            if dim.dim_param
        }


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@dataclass
class Plan:
    """The results of one (case, loss) so far, over its policies."""

    case: Case
    label: str
    loss: str
    truth: Reference
    matching: matching.Matching
    folder: Path
    generator: ModuleType | None
    source: Source
    files: dict[str, Path] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    ort_other: dict[str, Tensors] = field(default_factory=dict)
    torch_other: tuple[Tensors, Reference] | None = None
    run_own: dict[str, Tensors] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        return self.truth.exact is not None

    @property
    def suffix(self) -> str:
        return ".safetensors" if self.half else ".npz"


def against_torch(plan: Plan, outputs: Tensors, truth: Reference, forward: Tensors) -> list[tolerance.Worst]:
    """Compares outputs (with `forward`), loss and gradients with PyTorch's, one verdict each; none for a random model."""
    verdicts = []
    if plan.case.random:
        return []
    try:
        grads, present = plan.matching.gradients(outputs, truth.full)
        if truth.exact is not None:
            _, exact = plan.matching.gradients(outputs, truth.exact)
            return [tolerance.compare_half(grads, present, exact)]
    except ValueError as error:
        return [tolerance.Worst(problem=str(error))]
    verdicts.append(tolerance.compare(outputs, forward))
    if truth.loss is not None:
        verdicts.append(tolerance.compare(outputs, {"loss": np.float32(truth.loss)}))
    verdicts.append(tolerance.compare(grads, present, tolerance.largest(present)))
    return verdicts


def against(got: Tensors, want: Tensors) -> list[tolerance.Worst]:
    """Compares all outputs of two runtimes; gradients share the floor, other outputs have their own."""
    if set(got) != set(want):
        return [tolerance.Worst(problem=f"outputs differ: {sorted(set(got) ^ set(want))}")]
    grads = {name: value for name, value in want.items() if name.endswith(".grad")}
    rest = {name: value for name, value in want.items() if name not in grads}
    verdicts = [tolerance.compare(got, grads, tolerance.largest(grads))]
    return verdicts + ([tolerance.compare(got, rest)] if rest else [])


def verdict(report: Report, key: tuple[str, str, str], check: str, verdicts: list[tolerance.Worst]) -> None:
    """Adds one row for several comparisons: it passes if all do, and shows the one nearest to failing."""
    if not verdicts:
        report.add(key, check, None, RANDOM)
        return
    bad = [v for v in verdicts if not v.agrees]
    shown = bad[0] if bad else max(verdicts, key=lambda v: v.ratio)
    report.add(key, check, not bad, shown)


def same_bits(a: Tensors, b: Tensors) -> str:
    """Returns the first output whose bytes differ, or an empty text."""
    for name in sorted(set(a) | set(b)):
        if name not in a or name not in b:
            return f"{name} is in one of the two only"
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape or a[name].tobytes() != b[name].tobytes():
            return f"{name} differs"
    return ""


def check_file(report: Report, key: tuple[str, str, str], out: Path, policy: str) -> None:
    """Adds the rows `write` (recompute nodes are explicit) and `checker`."""
    nodes = onnx.load(out, load_external_data=False).graph.node
    copies = [n for n in nodes if any(p.key == "ckpt.role" and p.value == "recompute" for p in n.metadata_props)]
    unnamed = [n.name for n in copies if "/recompute" not in n.name]
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
    """Adds the rows `ort` and `ort-other`, and returns the unoptimised outputs at the case's own size."""
    key = (plan.label, plan.loss, policy)
    out, first = plan.files[policy], None
    if plan.half:
        report.add(key, "ort", None, "ONNX Runtime's CPU provider has no kernels for this dtype")
        return None
    feeds = case_feeds(plan.case, out)
    for level, value in LEVELS.items():
        outputs = run_ort(out, feeds, value)
        first = outputs if first is None else first
        verdict(report, key, f"ort {level}", against_torch(plan, outputs, plan.truth, plan.case.group("out")))
    try:
        inputs, outputs = plan.source.forward_at(OTHER)
    except Unfit as unfit:
        report.add(key, "ort-other", None, f"the file itself does not run at {OTHER[0]} x {OTHER[1]}: {unfit}")
        return first
    feeds = random_feeds(plan.case, out, inputs, outputs, 2)
    other = run_ort(out, feeds, UNOPTIMISED)
    plan.ort_other[policy] = other
    verdicts = [] if plan.case.random else [tolerance.compare(other, outputs)]
    if "none" in plan.ort_other:
        verdicts += against(other, plan.ort_other["none"])
    if plan.generator is not None and not plan.case.random:
        if plan.torch_other is None:  # the same feeds under every policy
            cotangents = {n.removesuffix(COTANGENT): c for n, c in feeds.items() if n.endswith(COTANGENT)}
            labels = feeds.get("labels")
            plan.torch_other = differentiate(plan.case, plan.loss, plan.generator, inputs, cotangents, labels)
        found, truth = plan.torch_other
        if plan.loss == "vjp":  # the sum of out·cot is no output of the graph
            truth = replace(truth, loss=None)
        verdicts += against_torch(plan, other, truth, found)
    verdict(report, key, "ort-other" if plan.generator is None else "ort-other vs torch", verdicts)
    return first


def check_run(report: Report, compiler: Compiler, plan: Plan, policy: str, by_ort: Tensors | None) -> None:
    """Adds the rows `run`, `run-other`, `verify`, `memory`."""
    key = (plan.label, plan.loss, policy)
    out, target = plan.files[policy], plan.folder / f"run-{policy}{plan.suffix}"
    inputs = plan.case.folder / "case.npz"
    if plan.half or plan.case.random or (plan.loss in LABELLED and "labels" not in plan.case.arrays):
        inputs = plan.folder / f"own{plan.suffix}"
        write_tensors(inputs, case_feeds(plan.case, out))
    answer = compiler.run(out, inputs, target)
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
            compiler.verify(plan.files["none"], out, None if plan.source.runs_at(VERIFIED) else inputs)
        except Refused as error:
            difference = f"verify: {error}" + (f"; {difference}" if difference else "")
        report.add(key, "verify", not difference, difference or "bit-equal to none")
    if plan.half:
        check_memory(report, plan, policy, answer, "on the inputs of the case")
        return
    if policy in plan.ort_other:
        own = run_at(compiler, plan, policy, "run-other", *plan.source.forward_at(OTHER))[1]
        verdict(report, key, "run-other", against(own, plan.ort_other[policy]))
    else:
        report.add(key, "run-other", None, "ONNX Runtime gave nothing to compare with")
    *forward_io, where = plan.source.forward_to_measure()
    answer = run_at(compiler, plan, policy, "memory", *forward_io)[0]
    check_memory(report, plan, policy, answer, where)


def run_at(
    compiler: Compiler, plan: Plan, policy: str, name: str, forward_inputs: Tensors, forward_outputs: Tensors
) -> tuple[dict, Tensors]:
    """Returns the report and the results of our runtime on these inputs, completed at random."""
    inputs, target = plan.folder / f"{name}.npz", plan.folder / f"{name}-{policy}-out.npz"
    out = plan.files[policy]
    write_tensors(inputs, random_feeds(plan.case, out, forward_inputs, forward_outputs, 2))
    answer = compiler.run(out, inputs, target)
    return answer, read_tensors(target)


def check_memory(report: Report, plan: Plan, policy: str, answer: dict, where: str) -> None:
    """Adds the row `memory`, from the figures of one run."""
    predicted, measured = answer["predicted_peak_bytes"], answer["measured_peak_bytes"]
    plan.peaks[policy] = measured
    off = abs(measured - predicted) / predicted
    good = measured <= predicted and off <= MEMORY_TOLERANCE
    detail = f"measured {measured}, predicted {predicted} ({100 * off:.2f} % off) {where}"
    if policy != "none" and "none" in plan.peaks:
        # The inputs of a case are few: its peak may lie where nothing can be recomputed.
        good = good and (plan.half or measured < plan.peaks["none"])
        detail += f", {100 * measured / plan.peaks['none']:.1f} % of none"
    report.add((plan.label, plan.loss, policy), "memory", good, detail)


def losses_of(case: Case, chosen: list[str]) -> list[str]:
    if chosen != ["auto"]:
        return chosen
    own = "loss" in case.group("out")
    stored = [kind for kind in KINDS if stored_reference(case, kind)]
    return [kind for kind in KINDS if kind in stored or kind == "vjp" or (kind == "own" and own)]


def check_case(
    report: Report, compiler: Compiler, case: Case, args: argparse.Namespace, generator, folder: Path
) -> None:
    """Checks all losses and policies of one file. A failure of one row never hides the others."""
    label = case.label + ("" if args.fuse != "both" else ", unfused" if compiler.options else ", fused")
    try:
        table = compiler.inspect(case.model)["parameters"]
    except (Refused, KeyError) as error:
        report.add((label, "-", "-"), "inspect", False, repr(error))
        return
    source = Source(case, generator)
    if source.refused and generator is not None:
        report.add((label, "-", "-"), "source", None, f"ONNX Runtime refuses the exported file: {source.refused}")
    for loss in losses_of(case, args.losses):
        try:
            truth = Reference({}, {}) if case.random else reference(case, loss, generator, args.cache)
        except Exception as error:
            report.add((label, loss, "-"), "reference", False, f"{type(error).__name__}: {error}")
            continue
        if truth is None:
            detail = "no PyTorch gradients stored, and none can be computed here"
            report.add((label, loss, "-"), "reference", None, detail)
            continue
        values = None if generator is None or case.random else lambda: contents(case, generator)
        found = matching.match(table, truth, values)
        detail = f"{sum(len(names) for _, names in found.groups)} of PyTorch's parameters"
        for what, names in (("by contents", found.by_contents), ("not in the file", found.missing)):
            detail += f"; {what}: {', '.join(names)}" if names else ""
        if found.buffers:
            detail += f"; buffers without a name: {', '.join(found.buffers.values())}"
        good = not found.missing and bool(found.groups)
        report.add((label, loss, "-"), "names", None if case.random else good, RANDOM if case.random else detail)
        scratch = folder / "-".join([label.replace("/", "-").replace(", ", "-"), loss])
        plan = Plan(case, label, loss, truth, found, scratch, generator, source)
        plan.folder.mkdir(exist_ok=True)
        for policy in args.policies:
            check_policy(report, compiler, plan, policy, args.no_runtime)


def check_policy(report: Report, compiler: Compiler, plan: Plan, policy: str, no_runtime: bool) -> None:
    key, out = (plan.label, plan.loss, policy), plan.folder / f"{policy.strip('%').replace(':', '-')}.onnx"
    stage, by_ort = "write", None
    try:
        loss = None if plan.loss == "own" else plan.loss
        compiler.optimize(plan.case.model, out, policy, loss, plan.source.measured_sizes())
        plan.files[policy] = out
        check_file(report, key, out, policy)
        back = compiler.inspect(out)
        report.add(key, "back", bool(back["outputs"]), f"read back with {sum(back['ops'].values())} nodes")
        stage = "ort"
        by_ort = check_ort(report, plan, policy)
    except Exception as error:  # whatever goes wrong is one failed row; the rest is still checked
        report.add(key, stage, False, f"{type(error).__name__}: {error}")
    if policy in plan.files and not no_runtime:
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
    parser = options.with_binary(__doc__)
    options.add_cases(parser, corpus=options.FIXTURES)
    parser.add_argument("--fuse", choices=["on", "off", "both"], default="on", help="whether models are fused")
    parser.add_argument("--policies", type=options.words, default=["none", "full", "selective"])
    parser.add_argument("--losses", type=options.words_of(("auto", *KINDS)), default=["auto"])
    parser.add_argument("--no-runtime", action="store_true", help="only what needs no libtorch")
    options.add_cache(parser)
    parser.add_argument("--keep", type=Path, help="keep the written files in this folder")
    parser.add_argument("--format", choices=["human", "json"], default="human")
    args = parser.parse_args()
    report = Report()
    fused, unfused = Compiler(args.ckpt_opt), Compiler(args.ckpt_opt, options=("--fuse", "off"))
    compilers = {"on": [fused], "off": [unfused], "both": [fused, unfused]}[args.fuse]
    cases = find_cases(args.corpus, args.case, args.file)
    generator = load_generator(args.corpus)
    with options.folder_or_scratch(args.keep) as folder:
        for case in cases:
            for compiler in compilers:
                check_case(report, compiler, case, args, generator, folder)
    show(report, args.format)
    return 1 if report.count("fail") or not report.count("pass") else 0
