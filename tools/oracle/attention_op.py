"""Compares the attention op with a float64 softmax in numpy, in our runtime and, through its body, in ONNX Runtime.

    python tools attention_op --ckpt-opt BINARY [--only TEXT] [--verbose]

Every case is one op between products with trainable tensors; its result and its log-sum-exp have cotangents. The cases cover
windows, groups of heads, softcap, biases of several shapes and types, ranks, and queries without any key. Values and
gradients must agree with the reference: in float32 to 1e-5 of the largest element, in 16-bit types to their own rounding.
Exit code 0 if all do, else 1 and a line for each case that does not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tools.lib import options
from tools.lib.compiler import Compiler, Refused
from tools.lib.onnx_runtime import run_ort

DTYPES = {"f32": (np.float32, 1e-5), "f16": (np.float16, 4e-3), "bf16": (ml_dtypes.bfloat16, 3e-2)}
"""numpy's type, and the error allowed against the largest element: operands of the gradient are rounded too."""


@dataclass(frozen=True)
class Case:
    label: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    bias: np.ndarray | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "f32"


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(3)
    q, k, v = (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6)
    seen = rng.random((2, 1, 9, 11)) < 0.7
    seen[0, 0, 4] = False
    low = np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)
    variants: dict[str, dict[str, Any]] = {
        "plain": {}, "scale": {"scale": 0.35}, "causal": {"causal": 1}, "softcap": {"softcap": 0.8, "causal": 1},
        "window": {"causal": 1, "window_left": 3}, "both sides": {"window_left": 2, "window_right": 1},
    }  # fmt: skip
    biases = {
        "none": None, "mask": seen, "padding": seen[:, :, :1], "lowest": low, "heads": rng.normal(size=(4, 1, 11)),
        "rows": rng.normal(size=(9, 1)), "all": rng.normal(size=(2, 4, 9, 11)), "one": rng.normal(size=(1,)),
    }  # fmt: skip
    for variant, attributes in variants.items():
        for name, bias in biases.items():
            yield Case(f"{variant}, {name}", q, k, v, bias, attributes)
    for dtype in DTYPES:
        for name, bias in biases.items():
            yield Case(f"{dtype}, {name}", q, k, v, bias, {"causal": 1, "scale": 0.35}, dtype)
    yield Case("more queries", (2, 3, 12, 4), (2, 3, 5, 4), (2, 3, 5, 4), None, {"causal": 1})
    yield Case("rank 3", (6, 5, 4), (2, 7, 4), (2, 7, 3), None, {"causal": 1})
    yield Case("rank 2", (5, 4), (7, 4), (7, 3), rng.normal(size=(5, 7)))
    yield Case("rank 5", (2, 2, 4, 5, 3), (2, 2, 1, 5, 3), (2, 2, 1, 5, 3), None, {"window_left": 1})
    yield Case("one", (1, 1, 1, 2), (1, 1, 1, 2), (1, 1, 1, 2))
    yield Case("tiles", (1, 2, 150, 16), (1, 2, 190, 16), (1, 2, 190, 16), None, {"causal": 1, "window_left": 70})


def reference(case: Case, q, k, v, bias, dy, dlse) -> dict[str, np.ndarray]:
    """Returns values and gradients in float64."""
    attributes = {"scale": 1.0, "causal": 0, "window_left": -1, "window_right": -1, "softcap": 0.0, **case.attributes}
    groups = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    wide_k, wide_v = (np.repeat(x, groups, axis=-3) if groups > 1 else x for x in (k, v))
    scores = attributes["scale"] * q @ np.swapaxes(wide_k, -1, -2)
    slope = attributes["scale"]
    if attributes["softcap"]:
        tanh = np.tanh(scores / attributes["softcap"])
        scores, slope = attributes["softcap"] * tanh, slope * (1 - tanh**2)
    if bias is not None:
        scores = np.where(bias, scores, -np.inf) if bias.dtype == bool else scores + bias
    queries, keys = scores.shape[-2:]
    far = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    left, right = attributes["window_left"], 0 if attributes["causal"] else attributes["window_right"]
    hidden = ((far < -left) if left >= 0 else False) | ((far > right) if right >= 0 else False)
    scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    p = weights / np.maximum(total, 1e-300)
    dp = dy @ np.swapaxes(wide_v, -1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    inner = ds * slope

    def gathered(x: np.ndarray) -> np.ndarray:
        return x if groups == 1 else x.reshape(*k.shape[:-2], groups, *x.shape[-2:]).sum(-3)

    found = {
        "out": p @ wide_v, "lse": (np.log(np.maximum(total, 1e-300)) + top)[..., 0], "q": inner @ wide_k, "k": gathered(np.swapaxes(inner, -1, -2) @ q),
        "v": gathered(np.swapaxes(p, -1, -2) @ dy),
    }  # fmt: skip
    if bias is not None and bias.dtype != bool:
        axes = tuple(range(ds.ndim - bias.ndim))
        summed = ds.sum(axes)
        ones = tuple(i for i, n in enumerate(bias.shape) if n == 1)
        found["bias"] = summed.sum(ones, keepdims=True)
    return found


def check(case: Case, compiler: Compiler, folder: Path) -> str:
    """Returns what is wrong, or an empty text."""
    kind, allowed = DTYPES[case.dtype]
    rng = np.random.default_rng(11)
    operands = {name: rng.normal(size=dims) for name, dims in zip("qkv", (case.q, case.k, case.v))}
    if case.bias is not None:
        operands["bias"] = case.bias
    # Numbers that the case's type has, in float32: so they go through ONNX Runtime, which multiplies few types.
    with np.errstate(over="ignore"):
        operands = {n: x if x.dtype == bool else x.astype(kind).astype(np.float32) for n, x in operands.items()}
    # A parameter has several elements, and the lowest number is not for multiplying.
    trained = [n for n, x in operands.items() if x.dtype != bool and x.size > 1 and np.abs(x).max() < 1e9]
    dy = rng.normal(size=(*case.q[:-1], case.v[-1])).astype(kind).astype(np.float32)
    dlse = rng.normal(size=case.q[:-1]).astype(np.float32)
    (folder / "a.ckir").write_text(model(case, operands, trained, dy.shape))
    compiler.optimize(folder / "a.ckir", folder / "a.onnx", "none", "vjp")
    cotangents = {"out.cotangent": dy, "lse.cotangent": dlse}
    feed = {f"x.{name}": x for name, x in operands.items()} | cotangents
    own, theirs = compiler.run_tensors(folder / "a.onnx", feed, folder, ".npz"), run_ort(folder / "a.onnx", feed)
    wide = {name: x if x.dtype == bool else x.astype(np.float64) for name, x in operands.items()}
    expected = reference(case, wide["q"], wide["k"], wide["v"], wide.get("bias"), dy.astype(np.float64), dlse)
    for runtime, found in (("our runtime", own), ("ONNX Runtime", theirs)):
        for name, want in expected.items():
            if name not in ("out", "lse", *trained):
                continue
            result = f"w.{name}.grad" if name in trained else name
            want = want * wide[name] if name in trained else want
            got = found[result].astype(np.float64)
            # The log-sum-exp of a query that sees no key is -inf in both.
            both = np.where(np.isneginf(got) & np.isneginf(want), 0, [got, want])
            scale = max(np.abs(both[1]).max(), np.abs(expected["out"]).max())
            gap = np.abs(both[0] - both[1]).max() / scale
            if not gap <= allowed:
                return f"{result} of {runtime} is {gap:.1e} off, allowed {allowed:.0e}"
    return ""


def model(case: Case, operands: dict[str, np.ndarray], trained: list[str], y: tuple[int, ...]) -> str:
    """Returns the op as .ckir: each trained operand times a weight of ones, cast to the case's type; the result cast
    back.
    """
    inputs, inits, lines = [], [], []

    def ty(code: str, dims: tuple[int, ...]) -> str:
        return f"{code}[{', '.join(map(str, dims))}]"

    for name, x in operands.items():
        code = "bool" if x.dtype == bool else "f32"
        at = f"x.{name}"
        inputs.append(f"%{at}: {ty(code, x.shape)}")
        if name in trained:
            inits.append(f"  init %w.{name} : {ty(code, x.shape)} = splat 1")
            lines.append(f"  %m.{name} = Mul %{at}, %w.{name} : {ty(code, x.shape)}")
            at = f"m.{name}"
        to = code if code == "bool" else case.dtype
        step = "Identity" if to == code else "Cast"
        lines.append(f"  %{name} = {step} %{at}{f' {{to={to}}}' if step == 'Cast' else ''} : {ty(to, x.shape)}")
    attributes = ", ".join(f"{name}={value}" for name, value in case.attributes.items())
    arguments = ", ".join(f"%{name}" for name in operands)
    types = f"{ty(case.dtype, y)}, {ty('f32', y[:-1])}"
    lines.append(f"  %y, %lse = Attention {arguments}{f' {{{attributes}}}' if attributes else ''} : {types}")
    back = "Identity %y" if case.dtype == "f32" else "Cast %y {to=f32}"
    lines.append(f"  %out = {back} : {ty('f32', y)}")
    return "\n".join([f"graph @a typed ({', '.join(inputs)}) -> (%out, %lse) {{", *inits, *lines, "}", ""])


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    compiler = Compiler(arguments.ckpt_opt)
    checked = failed = 0
    for case in cases():
        if arguments.only not in case.label:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                problem = check(case, compiler, Path(folder))
            except Refused as refusal:
                problem = str(refusal)
        checked, failed = checked + 1, failed + bool(problem)
        if problem or arguments.verbose:
            print(f"{case.label}: {problem or 'agrees'}")
    print(f"{checked - failed} of {checked} agree")
    return 1 if failed or not checked else 0
