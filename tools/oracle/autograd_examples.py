"""Examples for autograd.py: each op as ONNX nodes at opset 23, with random operands, and the same in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.random import Generator as Rng
from onnx import helper


@dataclass
class Made:
    """Numbers for one example. Operands have the same names in the node and in the reference's parameters."""

    nodes: list[onnx.NodeProto]
    real: dict[str, np.ndarray]
    """What is differentiated."""
    reference: Callable
    fixed: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=lambda: ["y"])


@dataclass
class Example:
    label: str
    rows: tuple[str, ...]
    """Rows of the op table that it covers."""
    make: Callable[[Rng], Made]


EXAMPLES: list[Example] = []


def example(label: str, *rows: str) -> Callable:
    def add(make: Callable[[Rng], Made]) -> Callable:
        EXAMPLES.append(Example(label, rows or (label,), make))
        return make

    return add


def shape(rng: Rng, least: int = 0, most: int = 4) -> list[int]:
    """Returns a shape of any rank with sizes 1 to 5."""
    return [int(n) for n in rng.integers(1, 6, rng.integers(least, most + 1))]


def real(rng: Rng, dims: list[int], low: float = -1.5, high: float = 1.5) -> np.ndarray:
    """Returns different values, none of them near 0, so that no tie and no kink is near."""
    n = math.prod(dims)
    values = low + (high - low) * (rng.permutation(n) + rng.uniform(0.2, 0.8, n)) / max(n, 1)
    values = np.where(np.abs(values) < 0.05, np.copysign(0.05 + np.abs(values), values), values)
    return values.reshape(dims)


def broadcastable(rng: Rng, dims: list[int]) -> list[int]:
    """Returns a shape that broadcasts to `dims`: some axes are 1, some leading ones are missing."""
    kept = dims[int(rng.integers(0, len(dims) + 1)) :]
    return [1 if rng.random() < 0.3 else n for n in kept]


def node(op: str, ins: list[str], outs: tuple[str, ...] = ("y",), **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, ins, list(outs), **attributes)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def axis_of(rng: Rng, rank: int) -> int:
    return int(rng.integers(-rank, rank))


# Functions of one operand: op, PyTorch's, range, attributes.

UNARY: list[tuple[str, Callable, tuple[float, float], dict]] = [
    ("Abs", torch.abs, (-1.5, 1.5), {}),
    ("Acos", torch.acos, (-0.9, 0.9), {}),
    ("Acosh", torch.acosh, (1.1, 3.0), {}),
    ("Asin", torch.asin, (-0.9, 0.9), {}),
    ("Asinh", torch.asinh, (-2.0, 2.0), {}),
    ("Atan", torch.atan, (-2.0, 2.0), {}),
    ("Atanh", torch.atanh, (-0.9, 0.9), {}),
    ("Celu", lambda x: F.celu(x, 0.75), (-2.0, 2.0), {"alpha": 0.75}),
    ("Cos", torch.cos, (-3.0, 3.0), {}),
    ("Cosh", torch.cosh, (-2.0, 2.0), {}),
    ("Elu", lambda x: F.elu(x, 0.75), (-2.0, 2.0), {"alpha": 0.75}),
    ("Erf", torch.erf, (-2.0, 2.0), {}),
    ("Exp", torch.exp, (-2.0, 2.0), {}),
    ("HardSigmoid", lambda x: (0.25 * x + 0.5).clamp(0, 1), (-3.0, 3.0), {"alpha": 0.25, "beta": 0.5}),
    ("Identity", lambda x: x * 1, (-2.0, 2.0), {}),
    ("LeakyRelu", lambda x: F.leaky_relu(x, 0.125), (-2.0, 2.0), {"alpha": 0.125}),
    ("Log", torch.log, (0.2, 3.0), {}),
    ("Mish", F.mish, (-3.0, 3.0), {}),
    ("Neg", torch.neg, (-2.0, 2.0), {}),
    ("Reciprocal", torch.reciprocal, (0.3, 2.0), {}),
    ("Relu", torch.relu, (-2.0, 2.0), {}),
    ("Sigmoid", torch.sigmoid, (-3.0, 3.0), {}),
    ("Sin", torch.sin, (-3.0, 3.0), {}),
    ("Sinh", torch.sinh, (-2.0, 2.0), {}),
    ("Softplus", F.softplus, (-3.0, 3.0), {}),
    ("Softsign", F.softsign, (-3.0, 3.0), {}),
    ("Sqrt", torch.sqrt, (0.2, 3.0), {}),
    ("Tan", torch.tan, (-1.2, 1.2), {}),
    ("Tanh", torch.tanh, (-2.0, 2.0), {}),
    ("ThresholdedRelu", lambda x: torch.where(x > 0.5, x, 0), (-2.0, 2.0), {"alpha": 0.5}),
]

for op, function, ends, attributes in UNARY:

    def unary(rng: Rng, op=op, function=function, ends=ends, attributes=attributes) -> Made:
        x = real(rng, shape(rng), *ends)
        return Made([node(op, ["x"], **attributes)], {"x": x}, lambda x: function(x))

    example(op)(unary)


@example("HardSwish")
def _(rng: Rng) -> Made:
    return Made([node("HardSwish", ["x"])], {"x": real(rng, shape(rng), -4.0, 4.0)}, lambda x: F.hardswish(x))


@example("Selu", "Elu")
def _(rng: Rng) -> Made:
    alpha, gamma = np.float32(1.67326319217681884765625), np.float32(1.05070102214813232421875)

    def selu(x: torch.Tensor) -> torch.Tensor:
        return F.elu(x, float(alpha)) * float(gamma)

    return Made([node("Selu", ["x"])], {"x": real(rng, shape(rng))}, selu)


@example("Gelu")
def _(rng: Rng) -> Made:
    approximate = ["none", "tanh"][int(rng.integers(2))]
    x = real(rng, shape(rng), -3.0, 3.0)
    return Made([node("Gelu", ["x"], approximate=approximate)], {"x": x}, lambda x: F.gelu(x, approximate=approximate))


@example("Swish", "Silu")
def _(rng: Rng) -> Made:
    nodes = [node("Sigmoid", ["x"], ("s",)), node("Mul", ["x", "s"])]
    return Made(nodes, {"x": real(rng, shape(rng), -3.0, 3.0)}, lambda x: F.silu(x))


@example("Swiglu", "SwiGlu")
def _(rng: Rng) -> Made:
    nodes = [node("Sigmoid", ["x"], ("s",)), node("Mul", ["x", "s"], ("t",)), node("Mul", ["t", "b"])]
    dims = shape(rng, 1)
    return Made(nodes, {"x": real(rng, dims), "b": real(rng, dims)}, lambda x, b: F.silu(x) * b)


# Functions of two operands that broadcast.

BINARY: list[tuple[str, Callable, tuple[float, float]]] = [
    ("Add", torch.add, (-1.5, 1.5)),
    ("Sub", torch.sub, (-1.5, 1.5)),
    ("Mul", torch.mul, (-1.5, 1.5)),
    ("Div", torch.div, (0.3, 1.5)),
    ("Pow", torch.pow, (0.3, 1.8)),
    ("Max", torch.maximum, (-1.5, 1.5)),
    ("Min", torch.minimum, (-1.5, 1.5)),
]

for op, function, ends in BINARY:

    def binary(rng: Rng, op=op, function=function, ends=ends) -> Made:
        dims = shape(rng)
        operands = [dims, broadcastable(rng, dims)]
        if rng.random() < 0.5:
            operands.reverse()
        # Apart by an offset, so that no element of one is one of the other.
        a, b = real(rng, operands[0], *ends), real(rng, operands[1], *ends) * 0.93
        return Made([node(op, ["a", "b"])], {"a": a, "b": b}, lambda a, b: function(a, b))

    example(op)(binary)


@example("Mod")
def _(rng: Rng) -> Made:
    dims = shape(rng)
    a, b = real(rng, dims), real(rng, broadcastable(rng, dims), 0.4, 0.9)
    return Made([node("Mod", ["a", "b"], fmod=1)], {"a": a, "b": b}, lambda a, b: torch.fmod(a, b))


@example("PRelu")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1)
    x, slope = real(rng, dims), real(rng, broadcastable(rng, dims))
    return Made([node("PRelu", ["x", "s"])], {"x": x, "s": slope}, lambda x, s: torch.where(x >= 0, x, x * s))


for op, function in (
    ("Sum", lambda parts: parts[0] + parts[1] + parts[2]),
    ("Mean", lambda parts: (parts[0] + parts[1] + parts[2]) / 3),
    ("Max", lambda parts: torch.maximum(torch.maximum(parts[0], parts[1]), parts[2])),
    ("Min", lambda parts: torch.minimum(torch.minimum(parts[0], parts[1]), parts[2])),
):

    def variadic(rng: Rng, op=op, function=function) -> Made:
        dims = shape(rng)
        operands = {
            name: factor * real(rng, d)
            for name, d, factor in (("a", dims, 1), ("b", broadcastable(rng, dims), 0.93), ("c", dims, 0.87))
        }
        return Made([node(op, ["a", "b", "c"])], operands, lambda a, b, c: function((a, b, c)))

    example(f"{op} of three", op if op != "Mean" else "Sum")(variadic)


@example("Where")
def _(rng: Rng) -> Made:
    dims = shape(rng)
    condition = rng.random(broadcastable(rng, dims)) < 0.5
    a, b = real(rng, dims), real(rng, broadcastable(rng, dims))
    return Made(
        [node("Where", ["c", "a", "b"])], {"a": a, "b": b}, lambda c, a, b: torch.where(c, a, b), {"c": condition}
    )


@example("Clip")
def _(rng: Rng) -> Made:
    x = real(rng, shape(rng))
    return Made([node("Clip", ["x", "low", "high"])], {"x": x, "low": np.array(-0.71), "high": np.array(0.83)},
                lambda x, low, high: torch.clamp(x, low, high))  # fmt: skip


@example("Cast")
def _(rng: Rng) -> Made:
    nodes = [node("Cast", ["x"], ("z",), to=onnx.TensorProto.DOUBLE), node("CastLike", ["z", "x"])]
    return Made(nodes, {"x": real(rng, shape(rng))}, lambda x: x * 1)


# Reductions.


def axes_of(rng: Rng, rank: int) -> list[int]:
    """Returns some axes, perhaps none, which means all."""
    chosen = [int(a) for a in rng.permutation(rank)[: rng.integers(0, rank + 1)]]
    return [a - rank if rng.random() < 0.5 else a for a in chosen]


def product(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


REDUCTIONS: list[tuple[str, Callable, tuple[float, float]]] = [
    ("ReduceSum", lambda x, d, k: x.sum(d, keepdim=k), (-1.5, 1.5)),
    ("ReduceMean", lambda x, d, k: x.mean(d, keepdim=k), (-1.5, 1.5)),
    ("ReduceMax", lambda x, d, k: x.amax(d, keepdim=k), (-1.5, 1.5)),
    ("ReduceMin", lambda x, d, k: x.amin(d, keepdim=k), (-1.5, 1.5)),
    ("ReduceProd", product, (-1.5, 1.5)),
    ("ReduceSumSquare", lambda x, d, k: x.square().sum(d, keepdim=k), (-1.5, 1.5)),
    ("ReduceL1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d, keepdim=k), (-1.5, 1.5)),
    ("ReduceL2", lambda x, d, k: torch.linalg.vector_norm(x, 2, d, keepdim=k), (-1.5, 1.5)),
    ("ReduceLogSum", lambda x, d, k: x.sum(d, keepdim=k).log(), (0.2, 1.5)),
    ("ReduceLogSumExp", lambda x, d, k: x.logsumexp(d, keepdim=k), (-1.5, 1.5)),
]

for op, function, ends in REDUCTIONS:

    def reduction(rng: Rng, op=op, function=function, ends=ends) -> Made:
        dims = shape(rng, 1)
        axes, keep = axes_of(rng, len(dims)), int(rng.integers(2))
        every = [a % len(dims) for a in axes] or list(range(len(dims)))
        made = Made([node(op, ["x", "d"], keepdims=keep)], {"x": real(rng, dims, *ends)},
                    lambda x, d: function(x, every, bool(keep)), {"d": ints(*axes)})  # fmt: skip
        if not axes:
            made.nodes, made.fixed = [node(op, ["x"], keepdims=keep)], {}
            made.reference = lambda x: function(x, every, bool(keep))
        return made

    example(op, op if op != "ReduceLogSum" else "ReduceSum")(reduction)


@example("ReduceProd with zeros", "ReduceProd")
def _(rng: Rng) -> Made:
    x = real(rng, [4, 5])
    x[0, 1] = x[2, 0] = x[2, 3] = 0.0
    return Made([node("ReduceProd", ["x", "d"], keepdims=0)], {"x": x}, lambda x, d: x.prod(1), {"d": ints(1)})


@example("ReduceMax of ties", "ReduceMax")
def _(rng: Rng) -> Made:
    x = rng.integers(0, 3, (4, 6)).astype(np.float64)
    return Made([node("ReduceMax", ["x", "d"])], {"x": x}, lambda x, d: x.amax(1, keepdim=True), {"d": ints(1)})


@example("ReduceL2 of zeros", "ReduceL2")
def _(rng: Rng) -> Made:
    x = real(rng, [3, 4])
    x[1] = 0.0
    return Made([node("ReduceL2", ["x", "d"])], {"x": x},
                lambda x, d: torch.linalg.vector_norm(x, 2, 1, keepdim=True), {"d": ints(1)})  # fmt: skip


for op, function in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)):

    def softmax(rng: Rng, op=op, function=function) -> Made:
        dims = shape(rng, 1)
        axis = axis_of(rng, len(dims))
        return Made([node(op, ["x"], axis=axis)], {"x": real(rng, dims)}, lambda x: function(x, axis))

    example(op)(softmax)


@example("CumSum")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1)
    axis, exclusive, reverse = axis_of(rng, len(dims)), int(rng.integers(2)), int(rng.integers(2))

    def sums(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        y = x.flip(axis) if reverse else x
        y = y.cumsum(axis) - (y if exclusive else 0)
        return y.flip(axis) if reverse else y

    nodes = [node("CumSum", ["x", "a"], exclusive=exclusive, reverse=reverse)]
    return Made(nodes, {"x": real(rng, dims)}, sums, {"a": np.array(axis, np.int64)})


# Products.


@example("MatMul")
def _(rng: Rng) -> Made:
    m, k, n = (int(v) for v in rng.integers(1, 6, 3))
    lead = shape(rng, 0, 2)
    a, b = [*lead, m, k], [*broadcastable(rng, lead), k, n]
    kind = int(rng.integers(4))
    if kind == 1:
        a = [k]
    elif kind == 2:
        b = [k]
    return Made([node("MatMul", ["a", "b"])], {"a": real(rng, a), "b": real(rng, b)}, lambda a, b: a @ b)


@example("Gemm")
def _(rng: Rng) -> Made:
    m, k, n = (int(v) for v in rng.integers(1, 6, 3))
    ta, tb = int(rng.integers(2)), int(rng.integers(2))
    operands = {
        "a": real(rng, [k, m] if ta else [m, k]), "b": real(rng, [n, k] if tb else [k, n]),
        "c": real(rng, broadcastable(rng, [m, n])),
    }  # fmt: skip

    def gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return 0.75 * ((a.T if ta else a) @ (b.T if tb else b)) + 0.5 * c

    return Made([node("Gemm", ["a", "b", "c"], alpha=0.75, beta=0.5, transA=ta, transB=tb)], operands, gemm)


for equation, *dims in (
    ("bij,bjk->bik", [2, 3, 4], [2, 4, 5]),
    ("bhid,bhjd->bhij", [2, 3, 4, 2], [2, 3, 5, 2]),
    ("...ij,jk", [2, 3, 4], [4, 5]),
    ("ii->i", [4, 4]),
    ("iij->j", [3, 3, 2]),
    ("i,j->ij", [3], [4]),
    ("abc,bd,dce->ae", [2, 3, 4], [3, 2], [2, 4, 3]),
    ("ij,ij->", [3, 4], [3, 4]),
    ("b...d,d...->b...", [2, 3, 4], [4, 1]),
    ("ijk->kij", [2, 3, 4]),
    ("bthd,hdk->btk", [2, 3, 2, 4], [2, 4, 5]),
):

    def einsum(rng: Rng, equation=equation, dims=dims) -> Made:
        operands = {name: real(rng, d) for name, d in zip("abc", dims)}
        return Made([node("Einsum", list(operands), equation=equation)], operands,
                    lambda **parts: torch.einsum(equation, *parts.values()))  # fmt: skip

    example(f"Einsum {equation}", "MatMul")(einsum)


for n in (1, 2, 3):

    def conv(rng: Rng, n=n) -> Made:
        group = int(rng.integers(1, 3))
        strides, dilations, pads = ([int(v) for v in rng.integers(1, 3, n)] for _ in range(3))
        kernel = [int(v) for v in rng.integers(1, 4, n)]
        size = [(k - 1) * d + int(rng.integers(1, 4)) for k, d in zip(kernel, dilations)]
        operands = {
            "x": real(rng, [2, 2 * group, *size]), "w": real(rng, [3 * group, 2, *kernel]), "b": real(rng, [3 * group]),
        }  # fmt: skip
        function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        nodes = [node("Conv", ["x", "w", "b"], group=group, strides=strides, dilations=dilations, pads=pads * 2)]
        return Made(nodes, operands, lambda x, w, b: function(x, w, b, strides, pads, dilations, group))

    def conv_transpose(rng: Rng, n=n) -> Made:
        group = int(rng.integers(1, 3))
        strides, dilations = ([int(v) for v in rng.integers(1, 3, n)] for _ in range(2))
        kernel, pads = [int(v) for v in rng.integers(2, 4, n)], [int(v) for v in rng.integers(0, 2, n)]
        size = [int(v) for v in rng.integers(2, 5, n)]
        more = [s - 1 for s in strides]
        operands = {
            "x": real(rng, [2, 2 * group, *size]), "w": real(rng, [2 * group, 3, *kernel]), "b": real(rng, [3 * group]),
        }  # fmt: skip
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
        nodes = [
            node("ConvTranspose", ["x", "w", "b"], group=group, strides=strides, dilations=dilations, pads=pads * 2,
                 output_padding=more)
        ]  # fmt: skip
        return Made(nodes, operands, lambda x, w, b: function(x, w, b, strides, pads, more, group, dilations))

    def max_pool(rng: Rng, n=n) -> Made:
        kernel = [int(v) for v in rng.integers(2, 4, n)]
        strides, pads = [int(v) for v in rng.integers(1, 3, n)], [k // 2 for k in kernel]
        x, ceil = real(rng, [2, 3, *(int(v) for v in rng.integers(4, 7, n))]), int(rng.integers(2))
        function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        nodes = [node("MaxPool", ["x"], kernel_shape=kernel, strides=strides, pads=pads * 2, ceil_mode=ceil)]
        return Made(nodes, {"x": x}, lambda x: function(x, kernel, strides, pads, ceil_mode=bool(ceil)))

    def average_pool(rng: Rng, n=n) -> Made:
        kernel = [int(v) for v in rng.integers(2, 4, n)]
        strides, pads = [int(v) for v in rng.integers(1, 3, n)], [k // 2 for k in kernel]
        x = real(rng, [2, 3, *(int(v) for v in rng.integers(4, 7, n))])
        ceil, include = int(rng.integers(2)), int(rng.integers(2))
        function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
        nodes = [
            node("AveragePool", ["x"], kernel_shape=kernel, strides=strides, pads=pads * 2, ceil_mode=ceil,
                 count_include_pad=include)
        ]  # fmt: skip
        return Made(nodes, {"x": x}, lambda x: function(x, kernel, strides, pads, bool(ceil), bool(include)))

    example(f"Conv over {n}", "Conv")(conv)
    example(f"ConvTranspose over {n}", "ConvTranspose")(conv_transpose)
    example(f"MaxPool over {n}", "MaxPool")(max_pool)
    example(f"AveragePool over {n}", "Conv")(average_pool)


@example("LpPool", "Conv")
def _(rng: Rng) -> Made:
    p = int(rng.integers(1, 4))
    x = real(rng, [2, 3, 5, 6])
    nodes = [node("LpPool", ["x"], kernel_shape=[2, 3], strides=[1, 2], p=p)]

    def pool(x: torch.Tensor) -> torch.Tensor:
        windows = x.abs().pow(p).unfold(2, 2, 1).unfold(3, 3, 2)
        return windows.sum((-1, -2)).pow(1 / p)

    return Made(nodes, {"x": x}, pool)


for op, function in (
    ("GlobalAveragePool", lambda x: x.mean((2, 3), keepdim=True)),
    ("GlobalMaxPool", lambda x: x.amax((2, 3), keepdim=True)),
    ("GlobalLpPool", lambda x: torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True)),
):

    def global_pool(rng: Rng, op=op, function=function) -> Made:
        return Made([node(op, ["x"])], {"x": real(rng, [2, 3, 4, 5])}, function)

    example(op, "ReduceMean")(global_pool)


for mode, torch_mode, coordinates, options in (
    ("nearest", "nearest", "asymmetric", {}),
    ("linear", "bilinear", "half_pixel", {"align_corners": False}),
    ("linear", "bilinear", "align_corners", {"align_corners": True}),
    ("cubic", "bicubic", "half_pixel", {"align_corners": False}),
    ("linear", "bilinear", "half_pixel", {"align_corners": False, "antialias": True}),
    ("cubic", "bicubic", "half_pixel", {"align_corners": False, "antialias": True}),
):

    def resize(rng: Rng, mode=mode, torch_mode=torch_mode, coordinates=coordinates, options=options) -> Made:
        antialias = bool(options.get("antialias"))
        size = [int(v) for v in (rng.integers(2, 5, 2) if antialias else rng.integers(2, 9, 2))]
        attributes: dict = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": "floor"}
        if antialias:
            # PyTorch's filter is Keys' with -0.5 here, and leaves out what lies outside.
            attributes |= {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
        nodes = [node("Resize", ["x", "", "", "s"], **attributes)]
        return Made(nodes, {"x": real(rng, [2, 3, 5, 6])},
                    lambda x, s: F.interpolate(x, size=size, mode=torch_mode, **options),
                    {"s": ints(2, 3, *size)})  # fmt: skip

    example(f"Resize {torch_mode} {coordinates}{' antialias' if 'antialias' in options else ''}", "Gather")(resize)


# Shapes.


@example("Reshape")
def _(rng: Rng) -> Made:
    return Made(
        [node("Reshape", ["x", "s"])], {"x": real(rng, [2, 3, 4])}, lambda x, s: x.reshape(2, 12), {"s": ints(0, -1)}
    )


@example("Flatten")
def _(rng: Rng) -> Made:
    dims = shape(rng, 2)
    axis = int(rng.integers(0, len(dims) + 1))
    return Made([node("Flatten", ["x"], axis=axis)], {"x": real(rng, dims)},
                lambda x: x.reshape(math.prod(dims[:axis]), math.prod(dims[axis:])))  # fmt: skip


@example("Transpose")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1)
    perm = [int(a) for a in rng.permutation(len(dims))]
    return Made([node("Transpose", ["x"], perm=perm)], {"x": real(rng, dims)}, lambda x: x.permute(perm))


@example("Squeeze", "Squeeze", "Unsqueeze")
def _(rng: Rng) -> Made:
    nodes = [node("Unsqueeze", ["x", "a"], ("z",)), node("Squeeze", ["z", "b"])]
    return Made(nodes, {"x": real(rng, [3, 1, 4])}, lambda x, a, b: x.unsqueeze(0).unsqueeze(4).squeeze(2),
                {"a": ints(0, -1), "b": ints(2)})  # fmt: skip


@example("Expand")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1)
    return Made([node("Expand", ["x", "s"])], {"x": real(rng, broadcastable(rng, dims))},
                lambda x, s: torch.broadcast_to(x, dims), {"s": ints(*dims)})  # fmt: skip


@example("Tile")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1, 3)
    times = [int(n) for n in rng.integers(1, 4, len(dims))]
    return Made([node("Tile", ["x", "r"])], {"x": real(rng, dims)}, lambda x, r: x.tile(times), {"r": ints(*times)})


@example("Concat")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1)
    axis = axis_of(rng, len(dims))
    other = list(dims)
    other[axis] = int(rng.integers(1, 4))
    operands = {"a": real(rng, dims), "b": real(rng, other), "c": real(rng, dims)}
    return Made([node("Concat", ["a", "b", "c"], axis=axis)], operands, lambda a, b, c: torch.cat([a, b, c], axis))


@example("Split")
def _(rng: Rng) -> Made:
    return Made([node("Split", ["x", "s"], ("y", "z", "u"), axis=-2)], {"x": real(rng, [2, 6, 3])},
                lambda x, s: torch.split(x, [1, 3, 2], -2)[::2], {"s": ints(1, 3, 2)}, ["y", "u"])  # fmt: skip


@example("Slice")
def _(rng: Rng) -> Made:
    x = real(rng, [5, 6, 7])
    fixed = {"a": ints(-1, 1), "e": ints(-100, 6), "d": ints(2, 0), "s": ints(-2, 3)}
    return Made([node("Slice", ["x", "a", "e", "d", "s"])], {"x": x},
                lambda x, a, e, d, s: x[1:6:3].flip(2)[:, :, ::2], fixed)  # fmt: skip


@example("Trilu")
def _(rng: Rng) -> Made:
    upper, k = int(rng.integers(2)), int(rng.integers(-2, 3))
    return Made([node("Trilu", ["x", "k"], upper=upper)], {"x": real(rng, [2, *shape(rng, 2, 2)])},
                lambda x, k: (torch.triu if upper else torch.tril)(x, int(k)), {"k": np.array(k, np.int64)})  # fmt: skip


for mode, torch_mode in (("constant", "constant"), ("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular")):

    def pad(rng: Rng, mode=mode, torch_mode=torch_mode) -> Made:
        x, pads = real(rng, [2, 3, 4, 5]), [int(n) for n in rng.integers(0, 4, 4)]
        fixed, operands = {"p": ints(0, 0, pads[0], pads[1], 0, 0, pads[2], pads[3])}, {"x": x}
        torch_pads = [pads[1], pads[3], pads[0], pads[2]]
        if mode == "constant":
            operands["v"] = np.array(0.25)

            def constant(x: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                inside = F.pad(torch.ones_like(x), torch_pads)
                return F.pad(x, torch_pads) + v * (1 - inside)

            return Made([node("Pad", ["x", "p", "v"], mode=mode)], operands, constant, fixed)
        return Made(
            [node("Pad", ["x", "p"], mode=mode)], operands, lambda x, p: F.pad(x, torch_pads, torch_mode), fixed
        )

    example(f"Pad {mode}", "Pad" if mode == "constant" else "Gather")(pad)


for mode in ("DCR", "CRD"):

    def depth_to_space(rng: Rng, mode=mode) -> Made:
        def blocks(x: torch.Tensor) -> torch.Tensor:
            n, c, h, w = x.shape
            if mode == "CRD":
                return F.pixel_shuffle(x, 2)
            return x.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // 4, 2 * h, 2 * w)

        return Made([node("DepthToSpace", ["x"], blocksize=2, mode=mode)], {"x": real(rng, [2, 8, 3, 2])}, blocks)

    example(f"DepthToSpace {mode}", "Transpose")(depth_to_space)


# Indices.


@example("Gather")
def _(rng: Rng) -> Made:
    dims = shape(rng, 1)
    axis = axis_of(rng, len(dims))
    n = dims[axis]
    at = rng.integers(-n, n, shape(rng, 0, 2))
    return Made([node("Gather", ["x", "i"], axis=axis)], {"x": real(rng, dims)},
                lambda x, i: x.movedim(axis, 0)[i].movedim(list(range(i.dim())), [axis % len(dims) + k for k in range(i.dim())]),
                {"i": at})  # fmt: skip


@example("GatherElements")
def _(rng: Rng) -> Made:
    at = rng.integers(0, 4, (3, 2, 5))
    return Made([node("GatherElements", ["x", "i"], axis=1)], {"x": real(rng, [3, 4, 5])},
                lambda x, i: torch.gather(x, 1, i), {"i": at})  # fmt: skip


@example("GatherND")
def _(rng: Rng) -> Made:
    at = np.stack([rng.integers(0, 3, (6,)), rng.integers(-4, 4, (6,))], -1)
    return Made(
        [node("GatherND", ["x", "i"])], {"x": real(rng, [3, 4, 5])}, lambda x, i: x[i[:, 0], i[:, 1]], {"i": at}
    )


for scattering, torch_reduction in (("none", None), ("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin")):

    def scatter_elements(rng: Rng, reduction=scattering, torch_reduction=torch_reduction) -> Made:
        at = (
            np.stack([rng.permutation(5)[:3] for _ in range(4)])
            if torch_reduction is None
            else rng.integers(0, 5, (4, 3))
        )
        operands = {"x": real(rng, [4, 5]), "u": 0.93 * real(rng, [4, 3])}
        if reduction == "mul":
            operands["x"][1, 2] = operands["u"][0, 0] = operands["u"][2, 1] = 0.0

        def scatter(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            if torch_reduction is None:
                return x.scatter(1, i, u)
            return x.scatter_reduce(1, i, u, torch_reduction)

        nodes = [node("ScatterElements", ["x", "i", "u"], axis=1, reduction=reduction)]
        return Made(nodes, operands, scatter, {"i": at})

    def scatter_nd(rng: Rng, reduction=scattering, torch_reduction=torch_reduction) -> Made:
        at = rng.permutation(5)[:3] if torch_reduction is None else rng.integers(0, 5, 3)
        operands = {"x": real(rng, [5, 4]), "u": 0.93 * real(rng, [3, 4])}

        def scatter(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            at = i.expand(3, 4)
            if torch_reduction is None:
                return x.scatter(0, at, u)
            return x.scatter_reduce(0, at, u, torch_reduction)

        return Made([node("ScatterND", ["x", "i", "u"], reduction=reduction)], operands, scatter, {"i": at[:, None]})

    example(f"ScatterElements {scattering}", "ScatterElements")(scatter_elements)
    example(f"ScatterND {scattering}", "ScatterND")(scatter_nd)


@example("OneHot")
def _(rng: Rng) -> Made:
    at = rng.integers(0, 5, (2, 3))

    def hot(i: torch.Tensor, d: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        on = F.one_hot(i, 5).to(v.dtype)
        return v[0] * (1 - on) + v[1] * on

    return Made([node("OneHot", ["i", "d", "v"])], {"v": real(rng, [2])}, hot, {"i": at, "d": np.array(5, np.int64)})


@example("TopK")
def _(rng: Rng) -> Made:
    largest = int(rng.integers(2))
    return Made([node("TopK", ["x", "k"], ("y", "at"), axis=1, largest=largest)], {"x": real(rng, [3, 6, 2])},
                lambda x, k: torch.topk(x, 3, 1, largest=bool(largest)).values, {"k": ints(3)})  # fmt: skip


@example("Compress", "Gather")
def _(rng: Rng) -> Made:
    kept = np.array([True, False, True, True])
    # Summed: the cotangent of a result whose size the data decides has no shape to plan with.
    nodes = [node("Compress", ["x", "c"], ("z",), axis=1), node("ReduceSum", ["z", "d"], keepdims=0)]
    return Made(nodes, {"x": real(rng, [3, 4])}, lambda x, c, d: x[:, c].sum(1), {"c": kept, "d": ints(1)})


@example("ReverseSequence", "GatherElements")
def _(rng: Rng) -> Made:
    lengths = rng.integers(1, 6, 3)

    def reverse(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cat([x[:n, b].flip(0), x[n:, b]]) for b, n in enumerate(ends.tolist())], 1)

    return Made([node("ReverseSequence", ["x", "ends"])], {"x": real(rng, [5, 3, 2])}, reverse, {"ends": lengths})


# Norms.


@example("LayerNormalization")
def _(rng: Rng) -> Made:
    dims = [*shape(rng, 1, 3), 6]
    axis = -int(rng.integers(1, 3))
    operands = {"x": real(rng, dims), "w": real(rng, dims[axis:]), "b": real(rng, dims[axis:])}
    return Made([node("LayerNormalization", ["x", "w", "b"], axis=axis, epsilon=1e-3)], operands,
                lambda x, w, b: F.layer_norm(x, dims[axis:], w, b, float(np.float32(1e-3))))  # fmt: skip


@example("RMSNormalization")
def _(rng: Rng) -> Made:
    dims = [*shape(rng, 1, 3), 6]
    operands = {"x": real(rng, dims), "w": real(rng, [6])}
    return Made([node("RMSNormalization", ["x", "w"], epsilon=1e-3)], operands,
                lambda x, w: F.rms_norm(x, [6], w, float(np.float32(1e-3))))  # fmt: skip


@example("BatchNormalization", "Div")
def _(rng: Rng) -> Made:
    operands = {"x": real(rng, [4, 3, 5]), "w": real(rng, [3]), "b": real(rng, [3]), "m": real(rng, [3]),
                "v": real(rng, [3], 0.4, 1.5)}  # fmt: skip

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        w, b, m, v = (t[:, None] for t in (w, b, m, v))
        return (x - m) / (v + float(np.float32(1e-3))).sqrt() * w + b

    return Made([node("BatchNormalization", ["x", "w", "b", "m", "v"], epsilon=1e-3)], operands, norm)


@example("BatchNormalization in training", "ReduceMean")
def _(rng: Rng) -> Made:
    operands = {"x": real(rng, [4, 3, 5]), "w": real(rng, [3]), "b": real(rng, [3])}
    nodes = [node("BatchNormalization", ["x", "w", "b", "m", "v"], epsilon=1e-3, training_mode=1)]
    # The running statistics only move; what they were does not matter. They are of the operand's own type.
    nodes = [
        node("ReduceMean", ["x", "d"], ("m",), keepdims=0),
        node("ReduceSumSquare", ["x", "d"], ("v",), keepdims=0),
        *nodes,
    ]
    return Made(nodes, operands, lambda x, w, b, d: F.batch_norm(x, None, None, w, b, True, 0.1, float(np.float32(1e-3))),
                {"d": ints(0, 2)})  # fmt: skip


@example("InstanceNormalization", "LayerNormalization")
def _(rng: Rng) -> Made:
    operands = {"x": real(rng, [2, 3, 4, 5]), "w": real(rng, [3]), "b": real(rng, [3])}
    return Made([node("InstanceNormalization", ["x", "w", "b"], epsilon=1e-3)], operands,
                lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=float(np.float32(1e-3))))  # fmt: skip


@example("GroupNormalization", "LayerNormalization")
def _(rng: Rng) -> Made:
    operands = {"x": real(rng, [2, 6, 4]), "w": real(rng, [6]), "b": real(rng, [6])}
    return Made([node("GroupNormalization", ["x", "w", "b"], num_groups=3, epsilon=1e-3)], operands,
                lambda x, w, b: F.group_norm(x, 3, w, b, float(np.float32(1e-3))))  # fmt: skip


@example("LpNormalization", "Div")
def _(rng: Rng) -> Made:
    p = int(rng.integers(1, 3))
    return Made(
        [node("LpNormalization", ["x"], axis=1, p=p)], {"x": real(rng, [3, 4, 2])}, lambda x: F.normalize(x, p, 1)
    )


@example("LRN", "Pow")
def _(rng: Rng) -> Made:
    return Made([node("LRN", ["x"], size=3, alpha=0.5, beta=0.75, bias=1.0)], {"x": real(rng, [2, 5, 3, 4])},
                lambda x: F.local_response_norm(x, 3, 0.5, 0.75, 1.0))  # fmt: skip


# Losses.


for loss_reduction in ("mean", "sum", "none"):

    def cross_entropy(rng: Rng, reduction=loss_reduction) -> Made:
        labels = rng.integers(0, 5, (4, 3))
        labels[0, 1] = -100
        operands, names = {"x": real(rng, [4, 5, 3])}, ["x", "t"]
        fixed = {"t": labels}
        nodes = [node("SoftmaxCrossEntropyLoss", names, reduction=reduction, ignore_index=-100)]
        return Made(nodes, operands, lambda x, t: F.cross_entropy(x, t, reduction=reduction), fixed)

    def negative_log(rng: Rng, reduction=loss_reduction) -> Made:
        labels = rng.integers(0, 5, (4, 3))
        nodes = [node("NegativeLogLikelihoodLoss", ["x", "t"], reduction=reduction)]
        return Made(
            nodes, {"x": real(rng, [4, 5, 3])}, lambda x, t: F.nll_loss(x, t, reduction=reduction), {"t": labels}
        )

    example(f"SoftmaxCrossEntropyLoss {loss_reduction}", "SoftmaxCrossEntropyLoss")(cross_entropy)
    example(f"NegativeLogLikelihoodLoss {loss_reduction}", "NegativeLogLikelihoodLoss")(negative_log)


# Attention and quantisation.


@example("Attention")
def _(rng: Rng) -> Made:
    causal, groups = bool(rng.integers(2)), int(rng.integers(1, 3))
    operands = {
        "q": real(rng, [2, 2 * groups, 4, 6]), "k": real(rng, [2, 2, 4, 6]), "v": real(rng, [2, 2, 4, 3]),
    }  # fmt: skip
    return Made([node("Attention", ["q", "k", "v"], is_causal=int(causal))], operands,
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))  # fmt: skip


@example("Attention with a bias", "Attention")
def _(rng: Rng) -> Made:
    operands = {
        "q": real(rng, [2, 2, 3, 6]), "k": real(rng, [2, 2, 5, 6]), "v": real(rng, [2, 2, 5, 3]),
        "m": real(rng, [*broadcastable(rng, [2, 2, 3]), 5]),
    }  # fmt: skip

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        scores = 2 * torch.tanh(q @ k.transpose(-1, -2) * 6**-0.5 / 2)
        return torch.softmax(scores + m, -1) @ v

    return Made([node("Attention", ["q", "k", "v", "m"], softcap=2.0)], operands, attention)


@example("QuantizeLinear and DequantizeLinear", "RoundThrough")
def _(rng: Rng) -> Made:
    operands = {"x": real(rng, [4, 6], -3.0, 3.0)}
    # A scale that every type holds exactly. The range of int8 ends at 2 and at -1.96875.
    nodes = [node("CastLike", ["c", "x"], ("s",)), node("QuantizeLinear", ["x", "s", "z"], ("i",)),
             node("DequantizeLinear", ["i", "s", "z"])]  # fmt: skip

    def fake(x: torch.Tensor, c: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        steps = x / c.to(x.dtype)
        whole = steps + (torch.round(steps) - steps).detach()
        return torch.clamp(whole + 1, -128, 127).sub(1) * c.to(x.dtype)

    return Made(nodes, operands, fake, {"c": np.array(0.015625, np.float32), "z": np.array(1, np.int8)})
