"""Runs ONNX's own node conformance cases through ckpt-opt: read, type, execute, compare.

    python tools conformance --ckpt-opt BINARY [--only TEXT] [--op A,B] [--every N] [--verbose] [--format human|json]
        [--jobs N]

The cases are those that the `onnx` package generates (`onnx.backend.test.case.node`). Each case runs as the file is. If
the file is refused because contents of integer operands decide a result's shape or rank, the case runs again with those
operands as initializers, and counts as `constant`. The tolerance of a result is the case's own; for bfloat16 it is that of
the suite's runner (`onnx.backend.test.runner`). The suite cannot know what a random op draws. Such cases are compared with
what the specification says of the result (`random_problem`), and count as `random`.

Every case ends in one row: passed, constant, random, expected to fail for the reason in EXPECTED or UNSUPPORTED, or
failed. Exit code 0 if none failed, and none passed that is listed as expected to fail.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.compose import add_prefix

from tools.lib import options
from tools.lib.compiler import Compiler, Refused

PROMISED_OPSET = 26
"""Cases of later opsets are run and counted apart."""

NEWEST_OPSET = 28
"""Cases of a later opset are listed, not run."""

SEED = "rng_seed"
"""The graph input that random ops get."""

SEEDS = 24
"""How often a random case is run."""

BFLOAT16_RTOL = 2.0**-6
"""Two units in the last place: what ONNX's runner allows a bfloat16 result at least."""

BATCH = 32
"""Cases of one run of the binary."""

SUPPORTED_TYPES = {
    TensorProto.BOOL, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8,
    TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ,
}  # fmt: skip

UNSUPPORTED: dict[str, str] = {
    op: reason
    for reason, ops in {
        "control flow": "If Loop Scan SequenceMap",
        "sequences, optionals and strings": "OptionalGetElement OptionalHasElement RegexFullMatch SequenceInsert "
        "SplitToSequence StringConcat StringNormalizer StringSplit TfIdfVectorizer",
        "classical machine learning, and optimizers as nodes": "Adagrad Adam ArrayFeatureExtractor Binarizer "
        "LabelEncoder Momentum TreeEnsemble",
        "recurrence over time": "CausalConvWithState LinearAttention",
        "signals and images": "BlackmanWindow HammingWindow HannWindow ImageDecoder MelWeightMatrix STFT",
        "detection and warping": "AffineGrid CenterCropPad Col2Im DeformConv GridSample MaxRoiPool MaxUnpool "
        "NonMaxSuppression RoiAlign",
        "integer products have no gradient: a quantised model is refused":
        "ConvInteger MatMulInteger QLinearConv QLinearMatMul",
        "not needed before opset 28": "SwiGLU",
        "not needed so far": "BitCast CumProd Det FlexAttention Unique",
    }.items()
    for op in ops.split()
}  # fmt: skip
"""Op to the reason why no case of it can pass. They travel through as opaque nodes."""

EXPECTED: dict[str, str] = {
    name: reason
    for reason, names in {
        "the sums of a 16-bit product are rounded in another order: one unit in the last place":
        "test_attention_4d_causal_fp16 test_attention_4d_causal_fp16_expanded",
        "zeros that are sums of float32 numbers which cancel: allowed is 1e-7 of a largest element of 10":
        "test_dft_inverse test_dft_inverse_opset19",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Case name (may hold wildcards) to the reason why it cannot pass; only a name in `_expanded` is one of such cases."""


@dataclass
class Row:
    case: str
    op: str
    opset: int
    outcome: str
    """passed, constant, random, expected, unsupported, type, opset or failed"""
    reason: str = ""


@dataclass
class Case:
    name: str
    model: onnx.ModelProto
    sets: list
    rtol: float
    atol: float
    op: str = field(default="")

    def opset(self) -> int:
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 0)


def cases() -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in collect_testcases(None):
            nodes = case.model.graph.node
            # `test_<op>..._expanded` is the same case with the op's function body in place of the op.
            op = nodes[0].op_type if len(nodes) == 1 else "(several)"
            yield Case(case.name, case.model, case.data_sets, case.rtol, case.atol, op)


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--op", type=options.words, default=[], help="cases of these ops, comma-separated")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth case only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="also list the cases that passed")
    parser.add_argument("--format", choices=["human", "json"], default="human")
    args = parser.parse_args()
    compiler = Compiler(args.ckpt_opt, timeout_s=120)
    chosen = [c for c in cases() if args.only in c.name and (not args.op or c.op in args.op)][:: args.every]
    rows = {case.name: row for case in chosen if (row := set_aside(case)) is not None}
    fixed = [case for case in chosen if case.name not in rows and not is_random(case)]
    batches = in_batches(fixed)
    for case in chosen:
        if case.name not in rows and is_random(case):
            rows[case.name] = judge_random(compiler, case)
    with ThreadPoolExecutor(args.jobs) as pool:
        for judged in pool.map(lambda batch: judge(compiler, batch), batches):
            rows |= {row.case: row for row in judged}
    ordered = [rows[case.name] for case in chosen]
    if args.format == "json":
        print(json.dumps([asdict(row) for row in ordered], indent=1))
    else:
        report(ordered, args.verbose)
    return int(any(row.outcome == "failed" for row in ordered))


def in_batches(chosen: list[Case]) -> list[list[Case]]:
    """Groups cases that can be parts of one model: of one opset, at most BATCH."""
    by_opset: dict[int, list[Case]] = {}
    for case in chosen:
        by_opset.setdefault(case.opset(), []).append(case)
    return [group[i : i + BATCH] for group in by_opset.values() for i in range(0, len(group), BATCH)]


def judge(compiler: Compiler, batch: list[Case]) -> list[Row]:
    """Runs cases of one opset and returns their rows."""
    problems = attempt(compiler, batch, constants=False)
    again = [
        case for case in batch if problems[case.name] is not None and any(map(is_constant, case.model.graph.input))
    ]
    refused = attempt(compiler, again, constants=True)
    rows = []
    for case in batch:
        problem = problems[case.name]
        how = "passed"
        if problem is not None and refused.get(case.name, problem) is None:
            how, problem = "constant", None
        why = listed(case)
        if why is not None and problem is None:
            how, problem = "failed", f"passes, but is listed: {why}"
        elif why is not None:
            how, problem = "expected", why
        elif problem is not None:
            how = "failed"
        rows.append(Row(case.name, case.op, case.opset(), how, problem or ""))
    return rows


def is_random(case: Case) -> bool:
    return case.name.startswith(("test_bernoulli", "test_training_dropout")) and "zero_ratio" not in case.name


def judge_random(compiler: Compiler, case: Case) -> Row:
    """Runs a case that draws random numbers under several seeds."""
    try:
        draws = [draw(compiler, case, seed) for seed in [0, *range(SEEDS)]]
        problem = random_problem(case, draws)
    except Refused as refused:
        problem = str(refused)
    return Row(case.name, case.op, case.opset(), "failed" if problem else "random", problem or "")


def draw(compiler: Compiler, case: Case, seed: int) -> list[np.ndarray]:
    constants = any(map(is_constant, case.model.graph.input))
    model, feeds = joined([("c0/", case)], 0, constants)
    found = run(compiler, model, feeds | {SEED: np.array(seed, np.int64)})
    return [found["c0/" + value.name] for value in case.model.graph.output]


def random_problem(case: Case, draws: list[list[np.ndarray]]) -> str | None:
    """What the results of the same seed twice and of other seeds have that the specification rules out.

    Bernoulli: each element is 0 or 1, and 1 with the probability that the operand says; in the function body that the
    suite expands (`Greater(random, input)`) 0 with that probability. Dropout: each element is 0, where
    the mask (if asked for) is false, or the operand's divided by 1 - ratio, and 0 with the probability `ratio`.
    """
    given, expected = ([array(value) for value in values] for values in case.sets[0])
    for results in draws:
        for found, like in zip(results, expected):
            if found.dtype != like.dtype or found.shape != like.shape:
                return f"{found.dtype}{list(found.shape)}, not {like.dtype}{list(like.shape)}"
    twice, seeds = draws[:2], draws[1:]
    if not all(np.array_equal(a, b) for a, b in zip(*twice)):
        return "the same seed gives other numbers"
    if all(np.array_equal(seeds[0][0], other[0]) for other in seeds):
        return "all seeds give the same numbers"
    x = given[0].astype(np.float64)
    if "bernoulli" in case.name:
        chance = 1 - x if case.name.endswith("_expanded") else x
        kept = [results[0] == 1 for results in seeds]
        wrong = any(np.any((results[0] != 0) & (results[0] != 1)) for results in seeds)
    else:
        ratio = float(given[1])
        chance, kept = np.full(x.shape, 1 - ratio), [results[0] != 0 for results in seeds]
        wrong = any(
            not np.allclose(results[0], np.where(hit, x / (1 - ratio), 0), rtol=1e-6)
            or (len(results) > 1 and not np.array_equal(results[1], hit))
            for results, hit in zip(seeds, kept)
        )
    if wrong:
        return "elements that the specification rules out"
    mean, deviation = chance.sum() * len(seeds), np.sqrt((chance * (1 - chance)).sum() * len(seeds))
    count = sum(int(hit.sum()) for hit in kept)
    if abs(count - mean) > 4 * deviation:
        return f"{count} elements are drawn where {mean:.0f} ± {deviation:.0f} are expected"
    return None


def listed(case: Case) -> str | None:
    expanded = case.name.endswith("_expanded")
    for name, why in EXPECTED.items():
        if fnmatchcase(case.name, name) and name.endswith("_expanded") == expanded:
            return why
    return None


def ops_of(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields every op of a graph and of those nested in it."""
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            for nested in [attribute.g, *attribute.graphs]:
                yield from ops_of(nested)


def set_aside(case: Case) -> Row | None:
    """Returns the row of a case that is not run."""

    def row(outcome: str, reason: str) -> Row:
        return Row(case.name, case.op, case.opset(), outcome, reason)

    # A case in `_expanded` may be made of what is not supported, too.
    for op in ops_of(case.model.graph):
        if op in UNSUPPORTED:
            return row("unsupported", UNSUPPORTED[op])
    if (foreign := foreign_type(case)) is not None:
        return row("type", foreign)
    if case.opset() > NEWEST_OPSET:
        return row("opset", f"opset {case.opset()}")
    return None


def foreign_type(case: Case) -> str | None:
    """Returns what the case holds beside tensors of supported element types."""
    for value in [*case.model.graph.input, *case.model.graph.output]:
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            return (kind or "nothing").removesuffix("_type")
        element = value.type.tensor_type.elem_type
        if element not in SUPPORTED_TYPES:
            return TensorProto.DataType.Name(element).lower()
    return None


SHAPING = ("scales", "roi")
"""Inputs of the cases of `Resize` whose numbers say what is read, and how large the result is."""


def is_constant(value: onnx.ValueInfoProto) -> bool:
    """Returns true if an input may decide a result's shape or rank, or may be a zero point: integers, booleans, floats of 8
    bits, or a single number."""
    tensor = value.type.tensor_type
    if value.name.rpartition("/")[2] in SHAPING:
        return True
    whole = tensor.elem_type not in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
    )  # fmt: skip
    return whole or len(tensor.shape.dim) == 0


def attempt(compiler: Compiler, batch: list[Case], constants: bool) -> dict[str, str | None]:
    """By name of the case: None if every data set gives the expected results, else what went wrong.

    The cases are run as one model of unconnected parts, for the start of a process is what costs time; where that is
    refused, without the part that the message names, or half of them at a time.
    """
    if not batch:
        return {}
    sets = max(len(case.sets) for case in batch)
    problems: dict[str, str | None] = {case.name: None for case in batch}
    for index in range(sets):
        parts = [(f"c{i}/", case) for i, case in enumerate(batch) if index < len(case.sets)]
        model, feeds = joined(parts, index, constants)
        try:
            results = run(compiler, model, feeds)
        except Refused as refused:
            if len(batch) == 1:
                return {batch[0].name: str(refused)}
            named = {int(i) for i in re.findall(r"\bc(\d+)/", str(refused))}
            if len(named) == 1 and (guilty := named.pop()) < len(batch):
                rest = [case for i, case in enumerate(batch) if i != guilty]
                return {batch[guilty].name: str(refused)} | attempt(compiler, rest, constants)
            half = len(batch) // 2
            return attempt(compiler, batch[:half], constants) | attempt(compiler, batch[half:], constants)
        for prefix, case in parts:
            for value, expected in zip(case.model.graph.output, case.sets[index][1]):
                found = results.get(prefix + value.name)
                problem = "is missing" if found is None else compare(found, array(expected), case.rtol, case.atol)
                if problem and problems[case.name] is None:
                    problems[case.name] = f"{value.name}: {problem}"
    return problems


def run(compiler: Compiler, model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        onnx.save(model, file)
        return compiler.run_tensors(file, feeds, Path(folder))


def joined(parts: list[tuple[str, Case]], index: int, constants: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns one model of all parts, with prefixed names, and the feeds of data set `index`. With `constants`,
    operands that may decide a shape are initializers.
    """
    whole = onnx.ModelProto()
    whole.CopyFrom(parts[0][1].model)
    graph = whole.graph
    for field_name in ("node", "input", "output", "initializer", "value_info"):
        del getattr(graph, field_name)[:]
    feeds = {SEED: np.array(1, np.int64)}  # Where nothing is random it is not used.
    for prefix, case in parts:
        one = add_prefix(case.model, prefix).graph
        for value in [*one.input, *one.output]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = prefix + dim.dim_param
        for value, given in zip(one.input, case.sets[index][0]):
            if constants and is_constant(value):
                tensor = given if isinstance(given, TensorProto) else numpy_helper.from_array(np.asarray(given))
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = value.name
            else:
                graph.input.add().CopyFrom(value)
                feeds[value.name] = array(given)
        for field_name in ("node", "output", "initializer"):
            getattr(graph, field_name).extend(getattr(one, field_name))
    return whole, feeds


def array(value) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def compare(found: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> str | None:
    if found.dtype != expected.dtype:
        return f"element type {found.dtype}, not {expected.dtype}"
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, not {list(expected.shape)}"
    if found.dtype.name == "bfloat16":
        rtol = max(rtol, BFLOAT16_RTOL)
    a, b = (x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in (found, expected))
    if np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        return None
    with np.errstate(invalid="ignore"):
        worst = np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)))
    return f"values differ by up to {worst:.3g}"


def report(rows: list[Row], verbose: bool) -> None:
    for row in rows:
        if row.outcome == "failed" or verbose:
            print(f"{row.outcome:11} {row.case} (opset {row.opset}): {row.reason}")
    for outcome, title in (
        ("expected", "expected to fail"),
        ("unsupported", "ops without support"),
        ("type", "element types and values without support"),
        ("opset", f"opsets after {NEWEST_OPSET}"),
    ):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.outcome == outcome:
                reasons.setdefault(row.reason, []).append(row.case)
        if reasons:
            print(f"\n{title}:")
        for reason, names in sorted(reasons.items()):
            shown = ", ".join(names) if outcome == "expected" else f"{len(names)} cases"
            print(f"  {reason}: {shown}")
    count = Counter(row.outcome for row in rows)
    for title, chosen in (
        (f"Up to opset {PROMISED_OPSET}", [row for row in rows if row.opset <= PROMISED_OPSET]),
        ("Of later opsets", [row for row in rows if row.opset > PROMISED_OPSET]),
    ):
        outcomes = Counter(row.outcome for row in chosen)
        good = outcomes["passed"] + outcomes["constant"] + outcomes["random"]
        judged = good + outcomes["expected"] + outcomes["failed"]
        print(f"\n{title}, {good} of {judged} cases of supported ops pass ({100 * good / max(judged, 1):.2f} %).")
    good = count["passed"] + count["constant"] + count["random"]
    judged = good + count["expected"] + count["failed"]
    print(
        f"\n{good} of {judged} cases of supported ops pass ({100 * good / max(judged, 1):.2f} %), "
        f"{count['constant']} of them with their integer operands as constants and {count['random']} judged by what a random draw promises; {count['expected']} are expected to "
        f"fail, {count['failed']} failed. Not run: {count['unsupported']} of unsupported ops, {count['type']} of other "
        f"element types, {count['opset']} of opsets after {NEWEST_OPSET}."
    )
