"""Compares gradients of every differentiable op with PyTorch's, on random shapes, broadcasts, ranks and types.

    python tools autograd --ckpt-opt BINARY [--draws 2] [--seed 0] [--only TEXT] [--dtype f64,f32,bf16,f16]
        [--verbose] [--format human|json]

Each example of autograd_examples.py is an op as an ONNX node, its operands, and the same in PyTorch. A draw joins all
examples into one model. ckpt-opt differentiates the model and runs it with random cotangents. The criteria:

  f64         every gradient is within 1e-10 of the largest element of PyTorch's (float64)
  f32         tolerance.py holds, against PyTorch in float64 on the same numbers
  bf16, f16   the error against float64, as a root mean square over all draws of the op, is at most 1.1 times that of
              PyTorch in the same type. Types without a PyTorch kernel are listed

A row of the op table with a gradient rule needs an example, or a reason in LEFT_OUT; a test of the op table (tests/unit/ops) holds
that. Needs tools/requirements-torch.txt. Exit code 1 if a criterion fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from tools.lib import options
from tools.lib.compiler import Compiler, Refused
from tools.oracle.autograd_examples import EXAMPLES, Example

RELATIVE_F64 = 1e-10
RELATIVE_F32 = 1e-5
FLOOR_F32 = 1e-7
HALF_FACTOR = 1.1

DTYPES = {
    "f64": (np.float64, torch.float64), "f32": (np.float32, torch.float32),
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16), "f16": (np.float16, torch.float16),
}  # fmt: skip

UNIT, FIRST = "unit", "first"

LEFT_OUT = {
    "Dropout": "PyTorch draws other masks; tests/runtime/random.rs checks mask and gradient",
    "Silu": "made by fusion from the parts that exporters write; the example Swish is fused into it",
    "SwiGlu": "made by fusion from the parts that exporters write; the example Swiglu is fused into it",
    "Rotary": "made by fusion; tests/properties/numeric.rs differentiates it by its parts, tools/tables/cases.py in whole models",
    "SumToShape": "made by rules, of gradients; tests/properties/numeric.rs differentiates it",
    "SliceGrad": "made by rules, of gradients; tests/properties/numeric.rs differentiates it",
    "GatherGrad": "made by rules, of gradients; tests/properties/numeric.rs differentiates it",
    "ConvInputGrad": "made by rules, of gradients; tests/properties/numeric.rs differentiates it",
    "ConvWeightGrad": "made by rules, of gradients; tests/properties/numeric.rs differentiates it",
    "GroupedMatMul": "of no ONNX op; tools/tables/aten.py compares it with PyTorch's, tools/oracle/sweep.py in whole models",
    "GroupedWeightGrad": "made by rules, of gradients; tests/properties/numeric.rs differentiates it",
    "Accumulate": "made by tiling, of gradients; tests/properties/numeric.rs differentiates it",
    "AddProduct": "made by tiling, of gradients; tests/properties/numeric.rs differentiates it",
    "ClassTerms": "made of losses whose classes ranks divide; tests/properties/numeric.rs differentiates it",
    "ClassLoss": "made by tiling, of losses; tests/properties/numeric.rs differentiates it",
    "SolveTriangular": "of no ONNX op; tests/runtime/linalg.rs compares it with libtorch's autograd",
    "Attention": "made by fusion; the examples of ONNX Attention are fused into it",
    "Offload": "made by planning; tests/properties/numeric.rs differentiates it",
    "Fetch": "made by planning; tests/properties/numeric.rs differentiates it",
    "Release": "made by planning; tests/properties/numeric.rs differentiates it",
    "AllReduce": "made of layers whose weights ranks divide; tests/cli/ranks.rs compares their training with that of one process",
    "OwnPart": "made of layers whose weights ranks divide; tests/cli/ranks.rs compares their training with that of one process",
    "GatherRows": "made where ranks divide the rows between layers; tests/cli/ranks.rs compares their training with that of one process",
    "OwnSlice": "made where ranks divide the rows between layers; tests/cli/ranks.rs compares their training with that of one process",
    "Shared": "made of layers whose weights ranks divide; tests/cli/ranks.rs compares their training with that of one process",
    "ConcatRanks": "over several ranks; tests/cli/ranks/program.rs compares training by it with PyTorch's gradients",
    "ReduceScatter": "over several ranks; tests/cli/ranks/program.rs compares training by it with PyTorch's gradients",
    "DequantizeFloat8": "of floats of 8 bits; tests/runtime/float8.rs compares it with PyTorch's gradients",
    "QuantizeFloat8": "of floats of 8 bits; tests/runtime/float8.rs compares it with PyTorch's gradients",
    "RoundThrough": "made of pairs of QuantizeLinear and DequantizeLinear, which have an example",
}
"""Rows with a gradient rule that no example names as its op, and what stands for them."""


COARSE = {
    "a chain of nodes, each of which rounds, where PyTorch's kernel rounds once": "Acosh, BatchNormalization in training, "
    "Celu, Div, Erf, Pad edge, Resize bicubic half_pixel, Resize bilinear align_corners, Resize bilinear half_pixel",
    "within the spread of few draws, not settled": "Einsum b...d,d...->b..., GlobalLpPool, InstanceNormalization, LpPool, "
    "MatMul, ReduceL2, ReduceL2 of zeros, ReduceProd with zeros, SoftmaxCrossEntropyLoss sum",
}
"""Examples whose 16-bit gradients were found less exact than PyTorch's, and why: reported, not failed."""


@dataclass
class Drawn:
    """One example with numbers."""

    prefix: str
    example: Example
    real: dict[str, np.ndarray]
    fixed: dict[str, np.ndarray]
    nodes: list[onnx.NodeProto]
    reference: Callable
    outputs: list[str]


@dataclass
class Tally:
    """The results of one op in one type, over all draws."""

    compared: int = 0
    worst: float = 0.0
    """Largest difference over what is allowed; for the 16-bit types 0."""
    ours: float = 0.0
    theirs: float = 0.0
    """Sums of squared errors."""
    problems: list[str] = field(default_factory=list)


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_counts(parser, draws=2, seed=0)
    parser.add_argument("--only", default="", help="examples whose label contains this")
    parser.add_argument("--dtype", type=options.words_of(DTYPES), default=list(DTYPES))
    parser.add_argument("--verbose", action="store_true", help="also list what holds")
    parser.add_argument("--format", choices=["human", "json"], default="human")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    compiler = Compiler(args.ckpt_opt, options=("--trainable", "*"))
    chosen = [example for example in EXAMPLES if args.only in example.label]
    tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for dtype in args.dtype:
        for draw in range(args.draws):
            rng = np.random.default_rng([args.seed, draw])
            drawn = [numbers(example, f"e{i}.", rng, DTYPES[dtype][0]) for i, example in enumerate(chosen)]
            compare_all(compiler, drawn, dtype, rng, tallies)
    failed = report(tallies, args)
    return int(failed)


def numbers(example: Example, prefix: str, rng: np.random.Generator, kind: type) -> Drawn:
    made = example.make(rng)
    real = {name: value.astype(kind) for name, value in made.real.items()}
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in made.nodes]
    for node in nodes:
        node.name = f"{prefix}{node.op_type}"
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = prefix + name if name else ""
    return Drawn(prefix, example, real, made.fixed, nodes, made.reference, made.outputs)


def joined(drawn: list[Drawn], kind: type) -> onnx.ModelProto:
    """One model of unconnected examples. Operands are initializers times the input UNIT, which is 1: a constant that
    nothing joins with an activation is no parameter."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes: list[onnx.NodeProto] = []
    weights = [numpy_helper.from_array(np.array(0, np.int64), FIRST)]
    outputs: list[onnx.ValueInfoProto] = []
    for one in drawn:
        for name, value in one.real.items():
            weight = f"{one.prefix}{name}"
            operand = f"{weight}.operand"
            if value.size == 1:
                # Nor is a single number: the first of two.
                nodes.append(helper.make_node("Mul", [weight, UNIT], [f"{operand}s"], f"{operand}s"))
                nodes.append(helper.make_node("Gather", [f"{operand}s", FIRST], [operand], operand))
            else:
                nodes.append(helper.make_node("Mul", [weight, UNIT], [operand], operand))
        for made in one.nodes:
            made.input[:] = [f"{n}.operand" if n.removeprefix(one.prefix) in one.real else n for n in made.input]
        nodes.extend(one.nodes)
        for name, value in (one.real | one.fixed).items():
            if name in one.real and value.size == 1:
                value = np.stack([value, value])
            weights.append(numpy_helper.from_array(np.array(value, order="C"), one.prefix + name))
        outputs.extend(helper.make_tensor_value_info(one.prefix + name, element, None) for name in one.outputs)
    unit = helper.make_tensor_value_info(UNIT, element, [])
    graph = helper.make_graph(nodes, "examples", [unit], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def torch_gradients(one: Drawn, kind: torch.dtype, cotangents: list[np.ndarray] | None, rng: np.random.Generator):
    """Returns PyTorch's gradients and their cotangents, which are drawn if not given."""
    real = {n: torch.tensor(v.astype(np.float64)).to(kind).requires_grad_() for n, v in one.real.items()}
    fixed = {n: torch.tensor(v) for n, v in one.fixed.items()}
    results = one.reference(**real, **fixed)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    if cotangents is None:
        cotangents = [rng.uniform(-1, 1, tuple(y.shape)) for y in results]
    torch.autograd.backward(results, [torch.tensor(c).to(kind) for c in cotangents])
    found = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in real.items()}
    return {n: g.to(torch.float64).numpy() for n, g in found.items()}, cotangents


def compare_all(compiler: Compiler, drawn: list[Drawn], dtype: str, rng: np.random.Generator, tallies: dict) -> None:
    np_kind, torch_kind = DTYPES[dtype]
    exact, native, cotangents = {}, {}, {}
    runnable = []
    for one in drawn:
        _, given = torch_gradients(one, torch.float64, None, rng)
        given = [np.asarray(c, np.float64).astype(np_kind).astype(np.float64) for c in given]
        exact[one.prefix], _ = torch_gradients(one, torch.float64, given, rng)
        if dtype in ("bf16", "f16"):
            try:
                native[one.prefix], _ = torch_gradients(one, torch_kind, given, rng)
            except RuntimeError as error:
                if "not implemented for" not in str(error) and "expected" not in str(error):
                    raise
                tallies[(one.example.label, dtype)].problems.append("none in PyTorch")
                continue
        cotangents[one.prefix] = given
        runnable.append(one)
    for one, found in gradients(compiler, runnable, np_kind, cotangents):
        tally = tallies[(one.example.label, dtype)]
        if isinstance(found, str):
            tally.problems.append(found)
            continue
        largest = max((float(np.abs(g).max()) for g in exact[one.prefix].values() if g.size), default=0.0)
        for name, want in exact[one.prefix].items():
            got = found.get(f"{one.prefix}{name}.grad")
            if got is not None and want.size == 1:
                got = got[0]
            if got is None or got.shape != want.shape:
                tally.problems.append(f"{name}: {'no gradient' if got is None else got.shape}, {want.shape} expected")
                continue
            if not want.size:
                continue
            got = got.astype(np.float64)
            tally.compared += want.size
            if not np.isfinite(got).all():
                tally.problems.append(f"{name}: not finite")
                continue
            if dtype in ("bf16", "f16"):
                tally.ours += float(np.square(got - want).sum())
                tally.theirs += float(np.square(native[one.prefix][name] - want).sum())
                continue
            top = float(np.abs(want).max())
            allowed = RELATIVE_F64 * (top + 1e-3 * largest)
            if dtype == "f32":
                allowed = RELATIVE_F32 * top + FLOOR_F32 * max(largest, 1.0)
            gap = float(np.abs(got - want).max())
            tally.worst = max(tally.worst, gap / allowed if allowed else float(gap > 0))
            if gap > allowed:
                shapes = {n: list(v.shape) for n, v in one.real.items()}
                tally.problems.append(f"d/d{name}: off by {gap:.3g}, {allowed:.3g} allowed, operands {shapes}")


def gradients(compiler: Compiler, drawn: list[Drawn], kind: type, cotangents: dict):
    """Yields each example with its gradients by name, or with the error message. Runs all examples at once if possible,
    else in halves.
    """
    if not drawn:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, step = (Path(folder) / name for name in ("model.onnx", "step.onnx"))
            onnx.save(joined(drawn, kind), model)
            compiler.optimize(model, step, "none", "vjp")
            feeds = {
                f"{one.prefix}{name}.cotangent": np.asarray(c).astype(kind)
                for one in drawn
                for name, c in zip(one.outputs, cotangents[one.prefix])
            }
            feeds[UNIT] = np.array(1, kind)
            results = compiler.run_tensors(step, feeds, Path(folder))
    except Refused as refused:
        if len(drawn) == 1:
            yield drawn[0], str(refused)
            return
        half = len(drawn) // 2
        yield from gradients(compiler, drawn[:half], kind, cotangents)
        yield from gradients(compiler, drawn[half:], kind, cotangents)
        return
    for one in drawn:
        yield one, results


def report(tallies: dict, args: argparse.Namespace) -> bool:
    failed = False
    rows, absent, coarse = [], defaultdict(list), []
    for (label, dtype), tally in sorted(tallies.items()):
        if tally.problems and set(tally.problems) == {"none in PyTorch"}:
            absent[dtype].append(label)
            continue
        bad = list(dict.fromkeys(tally.problems))
        if tally.ours > HALF_FACTOR**2 * tally.theirs:
            said = f"error {tally.ours**0.5:.3g}, PyTorch's own is {tally.theirs**0.5:.3g}"
            if why := next((why for why, names in COARSE.items() if label in names.split(", ")), None):
                coarse.append(f"{label} {dtype}: {said} ({why})")
            else:
                bad.append(said)
        failed |= bool(bad)
        rows.append({"example": label, "dtype": dtype, "elements": tally.compared, "problems": bad})
        if bad or (args.verbose and args.format == "human"):
            print(f"{'failed' if bad else 'holds':7} {label} {dtype}: {'; '.join(bad) or f'{tally.compared} elements'}",
                  file=sys.stderr if args.format == "json" else sys.stdout)  # fmt: skip
    good = sum(not row["problems"] for row in rows)
    if args.format == "json":
        print(
            json.dumps(
                {"rows": rows, "none_in_pytorch": absent, "coarser_as_listed": coarse},
                indent=1,
            )
        )
        return failed
    for dtype, labels in absent.items():
        print(f"PyTorch has no {dtype} kernel for: {', '.join(labels)}")
    for line in coarse:
        print(f"coarser than PyTorch, as listed: {line}")
    for row, why in LEFT_OUT.items():
        print(f"no example of its own: {row}: {why}")
    elements = sum(row["elements"] for row in rows)
    print(f"{good} of {len(rows)} examples and types hold but for {len(coarse)} as listed, {elements} elements of "
          "gradients compared.")  # fmt: skip
    return failed
