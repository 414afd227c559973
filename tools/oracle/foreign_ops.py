"""Compares foreign ops with ONNX Runtime: each op as one node behind a trainable product, as given and as written.

    python tools foreign_ops --ckpt-opt BINARY [--only TEXT] [--verbose]

The results must agree. The gradient of a random weighted sum of the results, along a random direction, must agree with
the difference quotient of ONNX Runtime's results. Exit code 0 if all do, else 1 and a line for each case that does not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tools.lib import options
from tools.lib.compiler import Compiler, Refused
from tools.lib.onnx_runtime import UNOPTIMISED, run_ort

ORT = "com.microsoft"
TOLERANCE = 1e-5
"""Of a result, against the largest element of it."""
STEP = 1e-2
SLOPE_TOLERANCE = 1e-2
"""Of a difference quotient of float32 results at STEP, against the gradient's norm."""

Array: TypeAlias = np.ndarray | None


@dataclass(frozen=True)
class OpCase:
    label: str
    domain: str
    op: str
    operands: list[Array]
    attributes: dict[str, Any] = field(default_factory=dict)
    results: tuple[int, ...] = (0,)
    """Slots of the results that are asked for."""
    opset: int = 23
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    """Symbolic sizes: (operand, axis) to name."""
    constants: tuple[int, ...] = ()
    """Operands that are part of the file besides scalars."""
    instead: Callable[[list[Array]], list[Array]] | None = None
    """Makes operands of the same meaning for ONNX Runtime, where it has no kernel for these."""

    def width(self) -> int:
        """Returns the size of the last axis of the trained operand."""
        operand = self.operands[self.trained()]
        assert operand is not None
        return operand.shape[-1]

    def trained(self) -> int:
        """Returns the operand that goes through the product: the first of floating point."""
        return next(i for i, v in enumerate(self.operands) if v is not None and v.dtype == np.float32)

    def model(self) -> onnx.ModelProto:
        trained = self.trained()
        inputs: list[onnx.ValueInfoProto] = []
        weights: list[onnx.TensorProto] = []
        names: list[str] = []
        for i, value in enumerate(self.operands):
            names.append("" if value is None else f"x{i}")
            if value is None:
                continue
            if value.ndim == 0 or i in self.constants:
                weights.append(numpy_helper.from_array(value, f"x{i}"))
                continue
            dims = [self.names.get((i, axis), size) for axis, size in enumerate(value.shape)]
            name = "raw" if i == trained else f"x{i}"
            inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), dims))
        weights.append(numpy_helper.from_array(np.eye(self.width(), dtype=np.float32), "w"))
        outputs = [f"y{i}" if i in self.results else "" for i in range(max(self.results) + 1)]
        graph = helper.make_graph(
            [
                helper.make_node("MatMul", ["raw", "w"], [f"x{trained}"], name="product"),
                helper.make_node(self.op, names, outputs, name="foreign", domain=self.domain, **self.attributes),
            ],
            "one_op",
            inputs,
            [helper.make_empty_tensor_value_info(o) for o in outputs if o],
            weights,
        )
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(self.domain, 1)] if self.domain else []
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feeds(self) -> dict[str, np.ndarray]:
        trained = self.trained()
        stored = (trained, *self.constants)
        given = {f"x{i}": v for i, v in enumerate(self.operands) if v is not None and v.ndim and i not in stored}
        return given | {"raw": self.operands[trained]}


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    def f(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(np.float32)

    def ints(high: int, *dims: int, kind: type = np.int64) -> np.ndarray:
        return rng.integers(0, high, dims).astype(kind)

    def mask(rows: list[int] | list[list[int]]) -> np.ndarray:
        return np.array(rows, np.int32)

    b, s, d, h = 2, 5, 8, 2
    batch_seq = {(i, a): n for i in (0, 1) for a, n in ((0, "b"), (1, "s"))}
    for suffix, names in (("", {}), (", dynamic", batch_seq)):
        for op, extra in (("SkipLayerNormalization", [f(d)]), ("SkipSimplifiedLayerNormalization", [])):
            plain, attributes = [f(b, s, d), f(b, s, d), f(d), *extra], {"epsilon": 1e-3}
            yield OpCase(f"{op}{suffix}", ORT, op, plain, {}, (0, 3), names=names)
            yield OpCase(f"{op}, bias{suffix}", ORT, op, [*plain, f(d)], attributes, (0, 3), names=names)
    op = "SkipLayerNormalization"
    yield OpCase(f"{op}, no beta", ORT, op, [f(b, s, d), f(b, s, d), f(d), None, f(d)], {}, (0, 3))
    yield OpCase(f"{op}, skip without batch", ORT, op, [f(b, s, d), f(s, d), f(d), f(d)])
    yield OpCase(f"{op}, skip of batch 1", ORT, op, [f(b, s, d), f(1, s, d), f(d), f(d)])

    op = "SimplifiedLayerNormalization"
    yield OpCase(op, "", op, [f(b, s, d), f(d)], opset=17)
    yield OpCase(
        f"{op}, all attributes", "", op, [f(b, s, d), f(d)], {"epsilon": 0.01, "axis": -1, "stash_type": 1}, opset=17
    )
    yield OpCase(f"{op}, two axes", "", op, [f(b, s, d), f(s, d)], {"axis": 1}, opset=17)

    op = "EmbedLayerNormalization"
    ids, segments = ints(10, b, s, kind=np.int32), ints(2, b, s, kind=np.int32)
    tables = [f(10, d), f(7, d), f(2, d), f(d), f(d)]
    holes = mask([[1, 1, 0, 1, 1], [0, 0, 1, 1, 1]])
    places = np.array([[3, 2, 1, 0, 6], [0, 1, 2, 3, 4]], np.int32)
    yield OpCase(op, ORT, op, [ids, segments, *tables], {"epsilon": 1e-3}, (0, 2))
    yield OpCase(f"{op}, dynamic", ORT, op, [ids, segments, *tables], {"epsilon": 1e-3}, (0, 1, 2), names=batch_seq)
    yield OpCase(f"{op}, no segments", ORT, op, [ids, None, *tables[:2], None, *tables[3:]], {}, (0, 2))
    yield OpCase(f"{op}, mask index", ORT, op, [ids, segments, *tables, holes], {}, (0, 1))
    yield OpCase(f"{op}, mask index without a mask", ORT, op, [ids, segments, *tables], {}, (0, 1))
    yield OpCase(f"{op}, positions", ORT, op, [ids, segments, *tables, None, places], {}, (0, 2))
    yield OpCase(f"{op}, positions of batch 1", ORT, op, [ids, segments, *tables, None, places[:1]], {}, (0, 2))

    yield OpCase("Gelu", ORT, "Gelu", [f(b, s, d)])
    yield OpCase("BiasGelu", ORT, "BiasGelu", [f(b, s, d), f(d)])
    yield OpCase("FastGelu", ORT, "FastGelu", [f(b, s, d)])
    yield OpCase("FastGelu, bias", ORT, "FastGelu", [f(b, s, d), f(d)])
    yield OpCase("QuickGelu", ORT, "QuickGelu", [f(b, s, d)])
    yield OpCase("QuickGelu, alpha", ORT, "QuickGelu", [f(b, s, d)], {"alpha": 1.0})

    yield OpCase("Selu", "", "Selu", [f(b, s, d)])
    yield OpCase("Selu, all attributes", "", "Selu", [f(b, s, d)], {"alpha": 0.7, "gamma": 2.0})
    yield OpCase("Celu", "", "Celu", [f(b, s, d)])
    yield OpCase("Celu, alpha", "", "Celu", [f(b, s, d)], {"alpha": 0.6}, opset=12)
    stretched = {"Acosh": lambda x: 1.2 + np.abs(x)}
    narrow = {name: lambda x: np.tanh(x) * 0.9 for name in ("Asin", "Acos", "Atanh", "Tan")}
    for op in ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh"):
        yield OpCase(op, "", op, [(stretched | narrow).get(op, lambda x: x)(f(b, s, d)).astype(np.float32)])

    op = "FusedMatMul"
    yield OpCase(op, ORT, op, [f(2, 3, 4, 5), f(2, 3, 5, 6)], {"alpha": 0.5})
    yield OpCase(f"{op}, A turned", ORT, op, [f(2, 3, 5, 4), f(2, 3, 5, 6)], {"transA": 1})
    yield OpCase(f"{op}, B turned", ORT, op, [f(2, 3, 4, 5), f(6, 5)], {"alpha": 0.5, "transB": 1})
    yield OpCase(f"{op}, both turned", ORT, op, [f(5, 4), f(6, 5)], {"transA": 1, "transB": 1})

    op, heads = "Attention", {"num_heads": h}
    packed = [f(b, s, d), f(d, 3 * d), f(3 * d)]
    full = mask([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    left = mask([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    yield OpCase("packed Attention", ORT, op, packed, heads)
    yield OpCase("packed Attention, dynamic", ORT, op, packed, heads, names={(0, 0): "b", (0, 1): "s"})
    yield OpCase("packed Attention, scale", ORT, op, packed, heads | {"scale": 0.3})
    wider = [packed[0], f(d, 20), f(20)]
    yield OpCase("packed Attention, other values", ORT, op, wider, heads | {"qkv_hidden_sizes": [8, 8, 4]})
    for label, m in (
        ("mask", full),
        ("mask from the left", left),
        ("all masked", np.zeros((b, s), np.int32)),
        ("mask by query", ints(2, b, s, s, kind=np.int32)),
        ("lengths", mask([3, 5])),
        ("a length of 0", mask([0, 5])),
    ):
        yield OpCase(f"packed Attention, {label}", ORT, op, [*packed, m], heads)
    soft = {"mask_filter_value": -2.0}
    yield OpCase("packed Attention, soft mask", ORT, op, [*packed, full], heads | soft)
    yield OpCase("packed Attention, causal", ORT, op, packed, heads | {"unidirectional": 1})
    yield OpCase("packed Attention, causal, mask", ORT, op, [*packed, left], heads | {"unidirectional": 1})
    yield OpCase("packed Attention, causal, soft mask", ORT, op, [*packed, left], heads | soft | {"unidirectional": 1})
    yield OpCase("packed Attention, bias", ORT, op, [*packed, None, None, f(1, h, s, s)], heads)
    yield OpCase("packed Attention, bias and mask", ORT, op, [*packed, full, None, f(1, h, s, s)], heads)

    op = "MultiHeadAttention"
    q, k, v = f(b, s, d), f(b, 4, d), f(b, 4, 6)
    yield OpCase(op, ORT, op, [q, k, v], heads)
    yield OpCase(f"{op}, projection bias", ORT, op, [q, k, v, f(22)], heads)
    yield OpCase(f"{op}, mask", ORT, op, [q, k, v, None, mask([[1, 1, 0, 1], [1, 0, 0, 0]])], heads)
    yield OpCase(f"{op}, lengths", ORT, op, [q, k, v, None, mask([2, 4])], heads)
    yield OpCase(f"{op}, bias", ORT, op, [q, k, v, None, None, f(1, 1, s, 4)], heads | {"scale": 0.2})
    yield OpCase(f"{op}, causal", ORT, op, [q, f(b, s, d), f(b, s, d)], heads | {"unidirectional": 1})
    yield OpCase(f"{op}, keys and values out", ORT, op, [q, f(b, s, d), f(b, s, d), f(24)], heads, (0, 1, 2))

    apart = [f(b, s, d), f(b, h, s, 4), f(b, h, s, 4)]
    yield OpCase(f"{op}, keys and values by head", ORT, op, apart, heads)

    def unpack(at: int) -> Callable[[list[Array]], list[Array]]:
        """Splits the operand `at`, [batch, sequence, heads, count, size], into `count` operands."""

        def apart(operands: list[Array]) -> list[Array]:
            x = operands[at]
            assert x is not None
            parts = [np.ascontiguousarray(x[:, :, :, i]).reshape(*x.shape[:2], -1) for i in range(x.shape[3])]
            return [*operands[:at], *parts]

        return apart

    yield OpCase(f"{op}, packed query", ORT, op, [f(b, s, h, 3, 4)], heads, instead=unpack(0))
    yield OpCase(f"{op}, packed key", ORT, op, [f(b, s, d), f(b, 6, h, 2, 4)], heads, instead=unpack(1))

    op, grouped = "GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 2}
    size = 16  # ONNX Runtime's rotary tables are for sizes of heads that eight divides
    q, k, v = f(b, s, 4 * size), f(b, s, 2 * size), f(b, s, 2 * size)
    whole = [None, None, np.full(b, s - 1, np.int32), np.array(s, np.int32)]
    tables, rotary = [f(9, size // 2), f(9, size // 2)], {"do_rotary": 1}
    dynamic = {(i, a): n for i in range(3) for a, n in ((0, "b"), (1, "s"))} | {(5, 0): "b"}
    for suffix, names in (("", {}), (", dynamic", dynamic)):
        yield OpCase(f"{op}{suffix}", ORT, op, [q, k, v, *whole], grouped, (0, 1, 2), names=names)
        for turn in ({}, {"rotary_interleaved": 1}):
            label = ", interleaved" if turn else ""
            operands, how = [q, k, v, *whole, *tables], grouped | rotary | turn
            yield OpCase(f"{op}, rotary{label}{suffix}", ORT, op, operands, how, (0, 1, 2), names=names)
    packed = [f(b, s, 8 * size), None, None, *whole, *tables]
    dynamic = {(0, 0): "b", (0, 1): "s", (5, 0): "b"}
    yield OpCase(f"{op}, packed", ORT, op, packed, grouped | rotary, (0, 1, 2), names=dynamic)
    for window in (1, 3, 9):
        near = grouped | {"local_window_size": window}
        yield OpCase(f"{op}, window {window}", ORT, op, [q, k, v, *whole], near, (0, 1, 2))
    yield OpCase(f"{op}, scale, cap", ORT, op, [q, k, v, *whole], grouped | {"scale": 0.3, "softcap": 2.0}, (0, 1, 2))
    empty = [f(b, 2, 0, size), f(b, 2, 0, size)]
    yield OpCase(f"{op}, empty cache", ORT, op, [q, k, v, *empty, *whole[2:]], grouped, (0, 1, 2))
    where = np.array([[2, 3, 4, 5, 6]] * b)  # ONNX Runtime only reads where the first sequence starts
    yield OpCase(f"{op}, positions", ORT, op, [q, k, v, *whole, *tables, where], grouped | rotary, (0, 1, 2))
    extra = [None, None, None, f(b, 1, s, s)]
    yield OpCase(f"{op}, bias", ORT, op, [q, k, v, *whole, *extra], grouped | {"softcap": 2.0}, (0, 1, 2))

    sink = [*whole, *[None] * 4, f(4)]
    yield OpCase(f"{op}, sinks", ORT, op, [q, k, v, *sink], grouped | {"local_window_size": 3}, (0, 1, 2))
    yield OpCase(f"{op}, smooth", ORT, op, [q, k, v, *whole], grouped | {"smooth_softmax": 1}, (0, 1, 2))

    op = "Attention"
    q, k, v = f(b, 4, s, 8), f(b, 2, 6, 8), f(b, 2, 6, 3)
    dynamic = {(0, 0): "b", (0, 2): "s", (1, 0): "b", (1, 2): "t", (2, 0): "b", (2, 2): "t"}
    seen = rng.integers(0, 2, (s, 6)).astype(bool)
    dead = rng.integers(0, 2, (b, 1, s, 6)).astype(bool)
    dead[0, 0, 2] = False
    added = f(b, 1, s, 6)
    added[0, 0, 2] = -np.inf
    causal = {"is_causal": 1}
    for suffix, names in (("", {}), (", dynamic", dynamic)):
        yield OpCase(f"grouped Attention{suffix}", "", op, [q, k, v], names=names)
        yield OpCase(f"causal Attention{suffix}", "", op, [q, k, v], causal, names=names)
        yield OpCase(f"capped Attention{suffix}", "", op, [q, k, v], {"softcap": 2.0, "scale": 0.7}, names=names)
        yield OpCase(f"masked Attention{suffix}", "", op, [q, k, v, seen], names=names)
    yield OpCase("Attention, a row without keys", "", op, [q, k, v, dead])
    yield OpCase("causal Attention, a row without keys", "", op, [q, k, v, dead], causal)
    yield OpCase("Attention, added mask", "", op, [q, k, v, f(b, 4, s, 6)])
    yield OpCase("causal Attention, added mask", "", op, [q, k, v, f(1, 1, s, 6)], causal | {"softcap": 1.5})
    yield OpCase("Attention, added mask, a row without keys", "", op, [q, k, v, added])
    yield OpCase("Attention, keys and values out", "", op, [q, k, v], results=(0, 1, 2))
    past = [q, k, v, None, f(b, 2, 3, 8), f(b, 2, 3, 3)]
    yield OpCase("causal Attention, past", "", op, past, causal, (0, 1, 2))
    yield OpCase("Attention, precision", "", op, [q, k, v], {"softmax_precision": 1})
    flat, grouped = [f(b, s, 32), f(b, 6, 16), f(b, 6, 6)], {"q_num_heads": 4, "kv_num_heads": 2}
    sizes = {(i, a): n for i in range(3) for a, n in ((0, "b"), (1, "s" if i == 0 else "t"))}
    yield OpCase("flat Attention", "", op, flat, grouped | causal)
    yield OpCase("flat Attention, dynamic", "", op, flat, grouped | causal, names=sizes)

    op = "RotaryEmbedding"
    x, flat, where = f(b, 3, s, 8), f(b, s, 24), ints(9, b, s)
    for interleaved in (0, 1):
        turn, mark = {"interleaved": interleaved}, ", interleaved" if interleaved else ""
        names = {(0, 0): "b", (0, 2): "s", (1, 0): "b", (1, 1): "s", (2, 0): "b", (2, 1): "s"}
        yield OpCase(f"{op}{mark}", "", op, [x, f(b, s, 4), f(b, s, 4)], turn)
        yield OpCase(f"{op}, dynamic{mark}", "", op, [x, f(b, s, 4), f(b, s, 4)], turn, names=names)
        part = turn | {"rotary_embedding_dim": 4}
        yield OpCase(f"{op}, partial{mark}", "", op, [x, f(b, s, 2), f(b, s, 2)], part)
        yield OpCase(f"{op}, positions{mark}", "", op, [x, f(9, 4), f(9, 4), where], turn)
        yield OpCase(f"{op}, flat{mark}", "", op, [flat, f(b, s, 4), f(b, s, 4)], turn | {"num_heads": 3})
        yield OpCase(f"{op}, flat, partial{mark}", "", op, [flat, f(9, 2), f(9, 2), where], part | {"num_heads": 3})
        yield OpCase(f"ORT {op}{mark}", ORT, op, [x, where, f(9, 4), f(9, 4)], turn)
        yield OpCase(f"ORT {op}, flat{mark}", ORT, op, [flat, where, f(9, 4), f(9, 4)], turn)
        yield OpCase(f"ORT {op}, start{mark}", ORT, op, [flat, np.array([3]), f(9, 4), f(9, 4)], turn)
        yield OpCase(f"ORT {op}, partial{mark}", ORT, op, [flat, where, f(9, 2), f(9, 2)], part | {"num_heads": 3})

    op, image, kernel = "Conv", f(2, 4, 7, 6), f(6, 2, 3, 2)
    dynamic = {(0, 0): "b", (0, 2): "h", (0, 3): "w"}
    for suffix, names in (("", {}), (", dynamic", dynamic)):
        for pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
            same = {"auto_pad": pad, "group": 2}
            yield OpCase(f"{op}, {pad}{suffix}", "", op, [image, kernel, f(6)], same, names=names)
            far = same | {"strides": [2, 3]}
            yield OpCase(f"{op}, {pad}, strides{suffix}", "", op, [image, kernel], far, names=names)
        pads = {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2], "group": 2}
        yield OpCase(f"{op}, pads{suffix}", "", op, [image, kernel, f(6)], pads, names=names)
    yield OpCase(f"{op} of one axis", "", op, [f(2, 3, 9), f(4, 3, 3), f(4)], {"pads": [2, 0], "strides": [2]})
    yield OpCase(f"{op} of three axes", "", op, [f(1, 2, 4, 5, 3), f(4, 1, 2, 2, 2)], {"group": 2})
    yield OpCase(f"{op} of points", "", op, [image, f(6, 4, 1, 1), f(6)], opset=11)
    op, kernel = "ConvTranspose", f(4, 3, 3, 2)
    for suffix, names in (("", {}), (", dynamic", dynamic)):
        wide: dict[str, Any] = {"strides": [2, 3], "group": 2}
        yield OpCase(f"{op}{suffix}", "", op, [image, kernel, f(3)], {}, names=names)
        same = wide | {"auto_pad": "SAME_UPPER"}
        yield OpCase(f"{op}, SAME_UPPER{suffix}", "", op, [image, f(4, 3, 3, 4), f(6)], same, names=names)
        more = {"pads": [1, 0, 0, 1], "output_padding": [1, 2], "dilations": [2, 1]}
        yield OpCase(f"{op}, pads{suffix}", "", op, [image, kernel], wide | more, names=names)
    yield OpCase(f"{op}, output shape", "", op, [image, kernel], wide | {"output_shape": [13, 16]})
    yield OpCase(f"{op} of one axis", "", op, [f(2, 3, 5), f(3, 2, 4), f(2)], {"strides": [2], "pads": [1, 1]})

    op, images = "GridSample", f(2, 3, 4, 5)
    inside, beyond = np.tanh(f(2, 3, 2, 2)), f(2, 3, 2, 2) * 2
    dynamic = {(0, 0): "b", (0, 2): "h", (0, 3): "w", (1, 0): "b", (1, 1): "s"}
    for corners in (0, 1):
        for outside in ("zeros", "border", "reflection"):
            for mode in ("linear", "nearest"):
                sampled: dict[str, Any] = {"mode": mode, "padding_mode": outside, "align_corners": corners}
                label = f"{op}, {mode}, {outside}{', corners' if corners else ''}"
                yield OpCase(label, "", op, [images, beyond], sampled)
                yield OpCase(f"{label}, dynamic", "", op, [images, inside], sampled, names=dynamic)
    yield OpCase(f"{op} of volumes", "", op, [f(2, 3, 4, 5, 2), np.tanh(f(2, 3, 1, 2, 3))])

    op, block = "Col2Im", np.array([2, 3])
    yield OpCase(op, "", op, [f(2, 18, 12), np.array([5, 5]), block], constants=(1, 2))
    spread: dict[str, Any] = {"strides": [2, 1], "pads": [1, 0, 0, 2], "dilations": [1, 2]}
    yield OpCase(f"{op}, strides", "", op, [f(2, 6, 6), np.array([4, 5]), block], spread, constants=(1, 2))

    op, pads, zero = "Pad", np.array([1, -1, 0, 2]), np.array(0.5, np.float32)
    for label, operands in (
        ("some axes", [f(2, 3, 4), pads, None, np.array([-1, 0])]),
        ("some axes and a value", [f(2, 3, 4), pads, zero, np.array([0, 1])]),
    ):
        yield OpCase(f"{op}, {label}", "", op, operands, constants=(1, 3))

    half, off = np.array(0.5, np.float32), np.array(False)
    yield OpCase("Dropout", "", "Dropout", [f(b, s, d)], {}, (0, 1), opset=22)
    yield OpCase("Dropout, training off", "", "Dropout", [f(b, s, d), half, off], {}, (0, 1), opset=13)
    yield OpCase("Dropout of opset 11", "", "Dropout", [f(b, s, d)], {"ratio": 0.3}, opset=11)


def reference(case: OpCase, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Returns ONNX Runtime's results with that weight in the product."""
    if case.instead is not None:
        operands = list(case.operands)
        operands[case.trained()] = operands[case.trained()] @ weight.astype(np.float32)
        plain = replace(case, operands=case.instead(operands), instead=None)
        return run_ort(plain.model(), plain.feeds(), UNOPTIMISED)
    model = case.model()
    index = next(i for i, t in enumerate(model.graph.initializer) if t.name == "w")
    model.graph.initializer[index].CopyFrom(numpy_helper.from_array(weight.astype(np.float32), "w"))
    return run_ort(model, case.feeds(), UNOPTIMISED)


def weighed(case: OpCase, weight: np.ndarray, weighing: dict[str, np.ndarray]) -> float:
    results = reference(case, weight)
    return sum(float(np.sum(results[n].astype(np.float64) * c)) for n, c in weighing.items())


def check(case: OpCase, compiler: Compiler, folder: Path, rng: np.random.Generator) -> str:
    """Returns what is wrong, or an empty text."""
    model = case.model()
    try:
        want = reference(case, np.eye(case.width()))
    except Exception as refused:  # ONNX Runtime has a class for each kind of failure
        return f"ONNX Runtime does not run this case: {str(refused).splitlines()[0]}"
    source, written = folder / "op.onnx", folder / "written.onnx"
    onnx.save(model, source)
    try:
        compiler.call(source, "-o", written, "--policy", "none", "--loss", "vjp")
    except Refused as refused:
        return str(refused)
    float_results = {n: v for n, v in want.items() if v.dtype == np.float32}
    weighing = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in float_results.items()}
    feeds = case.feeds() | {f"{n}.cotangent": c for n, c in weighing.items()}
    got = run_ort(written, feeds, UNOPTIMISED)
    for name, value in want.items():
        if got[name].shape != value.shape or got[name].dtype != value.dtype:
            return f"{name}: {got[name].dtype}{got[name].shape} for {value.dtype}{value.shape}"
        delta = np.abs(got[name].astype(np.float64) - value)
        allowed = TOLERANCE * max(1.0, float(np.abs(value).max(initial=0)))
        if not np.all(delta <= allowed):
            return f"{name}: off by {delta.max():.1e}, {allowed:.1e} allowed"
    gradient = got["w.grad"].astype(np.float64)
    if not np.isfinite(gradient).all():
        return "the gradient is not finite"
    way = rng.standard_normal(gradient.shape)
    way /= np.linalg.norm(way)
    there, back = (weighed(case, np.eye(len(way)) + sign * STEP * way, weighing) for sign in (1, -1))
    slope, ours = (there - back) / (2 * STEP), float(np.sum(gradient * way))
    allowed = SLOPE_TOLERANCE * max(1.0, float(np.linalg.norm(gradient)))
    if abs(slope - ours) > allowed:
        return f"slope {ours:.5f} for {slope:.5f}, {allowed:.1e} allowed"
    return ""


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--only", default="", help="cases whose label holds this text")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    arguments = parser.parse_args()
    compiler = Compiler(arguments.ckpt_opt)
    good = bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases(np.random.default_rng(0))):
            if arguments.only not in case.label:
                continue
            wrong = check(case, compiler, Path(folder), np.random.default_rng(number))
            good, bad = good + (not wrong), bad + bool(wrong)
            if wrong or arguments.verbose:
                print(f"{case.label}: {wrong or 'ok'}", flush=True)
    print(f"{good} agree, {bad} do not")
    return 1 if bad or not good else 0
