"""Compares the readers of PyTorch's own formats with PyTorch and with ONNX files of the same models.

    python tools frontends --ckpt-opt BINARY --corpus DIR [--case a,b] [--file program.pt2,traced.pt]
        [--cache DIR] [--no-ort] [--page docs/frontends.md]

The checks, for every case and file:
  inspect   the file is read; every parameter of PyTorch's has its name, and the same ones are frozen
  siblings  as many layers, the same shared keys and values, and the same parameters as in the case's ONNX file, or in
            its other PyTorch file where there is no ONNX file
  dropout   the graph has every dropout of the program (`record.json` and the ONNX files lose some)
  outputs   our runtime gives the recorded outputs of eager PyTorch; in bfloat16, with at most 1.1 times PyTorch's own
            error against float64
  gradients our runtime gives PyTorch's full gradients, under its names; in bfloat16 with the same limit. A model in
            training mode is random and is not compared
  sizes     a program with named sizes gives PyTorch's outputs and gradients at other sizes too
  verify    recomputing everything changes no bit, dropouts included
  ort       ONNX Runtime gives the same for the written file

tolerance.py defines equality, reference.py the references. Needs tools/requirements-torch.txt. Exit code 0 if all rows
pass.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from tools.lib import matching, options, tolerance
from tools.lib.compiler import Compiler, Refused, read_tensors, write_tensors
from tools.lib.feeds import COTANGENT, ELEMENT, required_inputs
from tools.lib.onnx_runtime import run_ort
from tools.lib.reference import (
    Case,
    Reference,
    as_array,
    differentiate,
    find_cases,
    forward,
    load_generator,
    reference,
    run_model,
)

SEED = 7
OWN = ["program.pt2", "traced.pt"]
SIBLINGS = ["onnx18.onnx", "onnx23.onnx", "onnx17ts.onnx", *OWN]
Tensors = dict[str, np.ndarray]


class Checks:
    """All rows so far, and the number of each status."""

    def __init__(self) -> None:
        self.counts = {"pass": 0, "fail": 0, "skip": 0}
        self.rows: dict[str, dict[str, tuple[str, str]]] = {}

    def add(self, label: str, check: str, good: bool | None, detail: object = "") -> None:
        status = {True: "pass", False: "fail", None: "skip"}[good]
        self.counts[status] += 1
        self.rows.setdefault(label, {})[check] = (status, str(detail))
        print(f"{status}  {label:32} {check:10} {detail}", flush=True)


def told(case: Case) -> list[str | Path]:
    """Returns options for what the file does not hold: names of outputs, and for TorchScript the types of inputs."""
    words: list[str | Path] = ["--output-names", ",".join(case.group("out"))]
    if case.model.suffix == ".pt":
        words += ["--inputs", case.folder / "case.npz"]
    return words


def feeds(case: Case, graph: Path) -> Tensors:
    """Returns the case's inputs and cotangents under the names of the graph; members of a list are `past.0` or
    `past_0`.
    """
    have = case.group("in") | {k + COTANGENT: v for k, v in case.group("cot").items()}
    have |= {name.replace(".", "_"): value for name, value in case.group("in").items()}
    have["rng_seed"] = np.int64(SEED)
    wanted = required_inputs(graph)
    missing = [name for name in wanted if name not in have]
    if missing:
        raise ValueError(f"the case has nothing for the inputs {', '.join(missing)}")
    return {name: np.asarray(have[name]).astype(ELEMENT[kind.elem_type], copy=False) for name, kind in wanted.items()}


def trained(truth: Reference, table: list[dict]) -> Reference:
    """Returns the reference without the parameters that the file does not train."""
    frozen = {n for e in table if not e["trainable"] for n in [e["name"], *e["aliases"]]}
    kept = {name: value for name, value in truth.full.items() if name not in frozen}
    exact = truth.exact and {name: value for name, value in truth.exact.items() if name not in frozen}
    return Reference(kept, truth.aliases, truth.loss, exact)


def frozen_differs(case: Case, table: list[dict]) -> str:
    """Returns the parameters that are trainable here but have no gradient in eager PyTorch, or the other way round."""
    import json

    path = case.folder / "grads.json"
    if not path.is_file():
        return ""
    record = json.loads(path.read_text())["grads"]
    known = {name: e["trainable"] for e in table for name in [e["name"], *e["aliases"]]}
    off = [n for n, g in record.items() if n in known and known[n] != (g is not None)]
    # A parameter that the outputs do not depend on has no gradient there and a zero here.
    off = [n for n in off if record[n] is not None or "base_layer" in n]
    return f"trained differently: {off[:4]}" if off else ""


def sibling(compiler: Compiler, case: Case) -> tuple[Path, dict] | None:
    for name in SIBLINGS:
        path = case.folder / name
        if path.is_file() and path != case.model:
            try:
                given = told(replace(case, model=path)) if name in OWN else []
                return path, compiler.call_json("inspect", path, *given)
            except Refused:
                continue
    return None


def crossing(table: dict) -> list[tuple[int, tuple[int, ...]]]:
    return sorted((s["producer"], tuple(s["consumers"])) for s in table["kv_sharing"])


def check_siblings(checks: Checks, compiler: Compiler, case: Case, label: str, ours: dict) -> None:
    other = sibling(compiler, case)
    if other is None:
        checks.add(label, "siblings", None, "no other file of this model is read")
        return
    path, theirs = other
    problems = []
    if len(ours["blocks"]) != len(theirs["blocks"]):
        problems.append(f"{len(ours['blocks'])} layers, {len(theirs['blocks'])} there")
    if crossing(ours) != crossing(theirs):
        problems.append(f"shared {crossing(ours)}, {crossing(theirs)} there")
    elements = [sum(int(np.prod(p["shape"])) for p in t["parameters"] if p["shape"]) for t in (ours, theirs)]
    detail = f"{len(ours['blocks'])} layers, {elements[0]} elements of parameters ({elements[1]} in {path.name})"
    checks.add(label, "siblings", not problems, "; ".join(problems) or detail)


def recorded_dropouts(model: Path) -> int:
    """Returns the number of active dropouts in the program, including those inside attention, as PyTorch reads it."""
    # An op, and its second, third and fifth argument: `dropout(x, p, train)`, attention's `dropout_p`.
    calls: list[tuple[str, list[Any]]] = []
    if model.suffix == ".pt":
        for node in torch.jit.load(model).inlined_graph.nodes():
            calls.append((node.kind().removeprefix("aten::"), [i.toIValue() for i in node.inputs()]))
    else:
        modules = torch.export.load(model).graph_module.modules()
        graphs = [m.graph for m in modules if isinstance(m, torch.fx.GraphModule)]
        for node in (node for graph in graphs for node in graph.nodes if node.op == "call_function"):
            named = [node.kwargs.get(name) for name in ("p", "train", "attn_mask", "dropout_p")]
            args = [*node.args, *([None] * (5 - len(node.args)))]
            name = str(node.target).removeprefix("aten.").split(".")[0]
            calls.append((name, [a if a is not None else b for a, b in zip(args, [None, *named])]))
    plain = [args for name, args in calls if name == "dropout" and args[1] > 0 and args[2]]
    inside = [args for name, args in calls if name == "scaled_dot_product_attention" and (args[4] or 0) > 0]
    return len(plain) + len(inside)


def dropouts(model: Path) -> int:
    return sum(n.op_type.startswith("Dropout") for n in onnx.load(model, load_external_data=False).graph.node)


def at_other_sizes(case: Case, table: dict) -> Tensors:
    """Returns inputs like the case's own, with other numbers for named sizes."""
    numbers = {"batch": 3, "sequence": 11}
    sizes = {name: numbers[dim["kind"]] for name, dim in table["dims"].items()}
    own = case.group("in") | {name.replace(".", "_"): value for name, value in case.group("in").items()}
    keys = {name.replace(".", "_"): name for name in case.group("in")}
    random = np.random.default_rng(11)
    drawn = {}
    for port in table["inputs"]:
        name, shape = port["name"], [sizes.get(d, d) for d in port["shape"]]
        if name not in own:
            continue
        like = own[name]
        if like.dtype.kind == "f":
            drawn[keys.get(name, name)] = random.normal(size=shape).astype(like.dtype)
        else:
            values = random.choice(like.ravel(), shape)
            if set(np.unique(like)) <= {0, 1}:  # a mask, which hides no row as a whole
                values[..., 0] = 1
            drawn[keys.get(name, name)] = values
    return drawn


def check_sizes(
    checks: Checks, compiler: Compiler, case: Case, table: dict, graph: Path, kind: str, generator, scratch: Path
) -> None:
    inputs = at_other_sizes(case, table)
    random = np.random.default_rng(12)
    floats = {n: v for n, v in forward(case, generator, inputs).items() if v.dtype.kind == "f"}
    cotangents = {} if kind == "own" else {n: random.normal(size=v.shape).astype(v.dtype) for n, v in floats.items()}
    outputs, truth = differentiate(case, kind, generator, inputs, cotangents, None)
    at, to = scratch / "other.npz", scratch / "other-out.npz"
    have = inputs | {name.replace(".", "_"): value for name, value in inputs.items()}
    have |= {name + COTANGENT: value for name, value in cotangents.items()}
    write_tensors(at, {name: have[name] for name in required_inputs(graph)})
    compiler.run(graph, at, to)
    found = read_tensors(to)
    truth = trained(truth, table["parameters"])
    ours, theirs = matching.match(table["parameters"], truth, None).gradients(found, truth.full)
    verdicts = [tolerance.compare(found, outputs), tolerance.compare(ours, theirs, tolerance.largest(theirs))]
    worst = max(verdicts, key=lambda v: v.ratio)
    shapes = ", ".join(str(list(v.shape)) for v in inputs.values())
    checks.add(case.label, "sizes", all(v.agrees for v in verdicts), f"{shapes}: {worst}")


def check_case(
    checks: Checks, compiler: Compiler, case: Case, generator, cache: Path, scratch: Path, with_ort: bool
) -> None:
    label = case.label
    given = told(case)
    try:
        table = compiler.call_json("inspect", case.model, *given)
    except Refused as error:
        checks.add(label, "inspect", False, error)
        return
    is_train = "train" in case.name
    half = case.name.endswith("bf16")
    problem = frozen_differs(case, table["parameters"])
    checks.add(label, "inspect", not problem, problem or f"{len(table['parameters'])} parameters")
    check_siblings(checks, compiler, case, label, table)
    own = case.group("out").keys() == {"loss"} or "loss" in case.group("out")
    kind = "own" if own else "vjp"
    files = {}
    for policy in ("none", "full"):
        files[policy] = scratch / f"{label.replace('/', '-')}-{policy}.onnx"
        try:
            loss = ["--loss", "output:loss" if own else "vjp"]
            compiler.call_json(case.model, "-o", files[policy], "--policy", policy, *loss, *given)
        except Refused as error:
            checks.add(label, "write", False, error)
            return
    count = dropouts(files["none"])
    if is_train:
        ours, recorded = table["ops"].get("ckpt::Dropout", 0), recorded_dropouts(case.model)
        detail = f"{ours} dropouts, {recorded} in the program, {count} with their gradients"
        checks.add(label, "dropout", 0 < ours == recorded, detail)
    inputs = feeds(case, files["none"])
    suffix = ".safetensors" if half else ".npz"
    at, to = scratch / f"in{suffix}", scratch / f"out{suffix}"
    write_tensors(at, inputs)
    try:
        compiler.run(files["none"], at, to)
        found = read_tensors(to)
    except Refused as error:
        checks.add(label, "run", False, error)
        return
    if is_train:
        checks.add(label, "outputs", None, "random")
    else:
        if half and generator is None:
            checks.add(label, "outputs", None, "half precision is judged by float64, which needs the generator")
        elif half:
            exact = {n: as_array(v) for n, v in run_model(case, generator, case.group("in"), exact=True)[1].items()}
            verdict = tolerance.compare_half(found, case.group("out"), exact)
            checks.add(label, "outputs", verdict.agrees, verdict)
        else:
            verdict = tolerance.compare(found, case.group("out"))
            checks.add(label, "outputs", verdict.agrees, verdict)
        try:
            truth = reference(case, kind, generator, cache)
        except Exception as error:  # a reference that cannot be had is no verdict on us
            truth = None
            checks.add(label, "gradients", None, f"{type(error).__name__}: {error}")
        if truth is not None:
            truth = trained(truth, table["parameters"])
            match = matching.match(table["parameters"], truth, None)
            try:
                ours, theirs = match.gradients(found, truth.full)
                verdict = tolerance.compare(ours, theirs, tolerance.largest(theirs))
                if truth.exact is not None:
                    verdict = tolerance.compare_half(ours, theirs, match.gradients(found, truth.exact)[1])
                missing = f"; missing {match.missing}" if match.missing else ""
                checks.add(label, "gradients", verdict.agrees and not missing, f"{len(ours)}: {verdict}{missing}")
            except ValueError as error:
                checks.add(label, "gradients", False, error)
        if table["dims"] and not half and generator is not None:
            try:
                check_sizes(checks, compiler, case, table, files["none"], kind, generator, scratch)
            except (Refused, ValueError, KeyError, RuntimeError) as error:
                checks.add(label, "sizes", False, f"{type(error).__name__}: {error}")
    try:
        compiler.verify(files["none"], files["full"], at)
        checks.add(label, "verify", True, f"bit-equal, {count} dropouts")
    except Refused as error:
        checks.add(label, "verify", False, error)
    if not with_ort or half:
        return
    try:
        theirs = run_ort(files["none"], inputs)
    except Exception as error:
        checks.add(label, "ort", False, f"{type(error).__name__}: {str(error)[:200]}")
        return
    grads = {n: v for n, v in theirs.items() if n.endswith(".grad")}
    rest = {n: v for n, v in theirs.items() if n not in grads}
    verdicts = [tolerance.compare(found, rest), tolerance.compare(found, grads, tolerance.largest(grads))]
    checks.add(label, "ort", all(v.agrees for v in verdicts), max(verdicts, key=lambda v: v.ratio))


COLUMNS = ["inspect", "siblings", "dropout", "outputs", "gradients", "sizes", "verify", "ort"]


def page(checks: Checks) -> str:
    """Returns the page: a row for each case and file; a number is the distance to PyTorch as a share of the tolerance."""
    lines = [
        "# PyTorch's own files",
        "",
        "Made by `python tools frontends --file program.pt2,traced.pt --page docs/frontends.md`, whose `--help` describes each check.",
        "A number is the largest distance to the reference, as a share of the tolerance (`tools/lib/tolerance.py`).",
        "",
        ", ".join(f"{n} {status}" for status, n in checks.counts.items()),
        "",
        "| case | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for label, row in sorted(checks.rows.items()):
        cells = []
        for column in COLUMNS:
            status, detail = row.get(column, ("", ""))
            share = detail.rpartition("(x")[2].removesuffix(")") if "(x" in detail else ""
            cells.append(f"{status} {share}".strip())
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    notes = [
        f"- {label}, {check}: {detail}"
        for label, row in sorted(checks.rows.items())
        for check, (status, detail) in row.items()
        if status != "pass"
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_cases(parser, files="program.pt2")
    options.add_cache(parser)
    parser.add_argument("--no-ort", action="store_true")
    options.add_page(parser)
    args = parser.parse_args()
    generator = load_generator(args.corpus)
    compiler, checks = Compiler(args.ckpt_opt), Checks()
    with tempfile.TemporaryDirectory() as scratch:
        for case in find_cases(args.corpus, args.case, args.file):
            try:
                check_case(checks, compiler, case, generator, args.cache, Path(scratch), not args.no_ort)
            except Exception as error:  # one case never hides the others
                checks.add(case.label, "-", False, f"{type(error).__name__}: {error}")
    print(", ".join(f"{n} {status}" for status, n in checks.counts.items()))
    if args.page:
        args.page.write_text(page(checks))
    return 1 if checks.counts["fail"] or not checks.counts["pass"] else 0
