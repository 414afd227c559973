"""Builds inputs for a training graph: those of a case, or random ones at another batch and sequence length."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from tools.lib.reference import Case

COTANGENT = ".cotangent"
SEED = {"rng_seed": np.asarray(20, np.int64)}
"""What a graph with random ops draws from."""
ELEMENT = {
    onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.DOUBLE: np.float64, onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16, onnx.TensorProto.INT64: np.int64, onnx.TensorProto.INT32: np.int32,
    onnx.TensorProto.BOOL: np.bool_,
}  # fmt: skip


def required_inputs(model: Path) -> dict[str, onnx.TypeProto.Tensor]:
    """Returns the graph inputs without an initializer, in order."""
    graph = onnx.load(model, load_external_data=False).graph
    stored = {tensor.name for tensor in graph.initializer}
    return {value.name: value.type.tensor_type for value in graph.input if value.name not in stored}


def case_feeds(case: Case, graph: Path) -> dict[str, np.ndarray]:
    """Returns the case's inputs, cotangents and labels for the inputs of `graph`. A cotangent without an input is an
    error.
    """
    have = case.group("in") | {k + COTANGENT: v for k, v in case.group("cot").items()} | SEED
    wanted = required_inputs(graph)
    if "labels" in wanted and "labels" not in have:
        have["labels"] = case.labels()
    missing = [name for name in wanted if name not in have]
    if missing:
        raise ValueError(f"the case has nothing for the inputs {', '.join(missing)}")
    if any(name.endswith(COTANGENT) for name in wanted):
        lost = [n for n in have if n.endswith(COTANGENT) and n not in wanted]
        if lost:
            raise ValueError(f"the graph has no input {', '.join(lost)}")
    return {name: have[name].astype(ELEMENT[kind.elem_type], copy=False) for name, kind in wanted.items()}


def resized(array: np.ndarray, symbols: list[str], sizes: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    """Random values of the same kind at another size: integers drawn from the case's own values, a 0/1 mask again a
    prefix mask (a row of padding only would leave attention nothing to look at), floats normal."""
    shape = [sizes.get(symbol, extent) for symbol, extent in zip(symbols, array.shape)]
    if array.dtype.kind == "f":
        return rng.standard_normal(shape).astype(array.dtype)
    if set(np.unique(array)) <= {0, 1}:
        mask = np.ones(shape, array.dtype)
        mask[-1, ..., shape[-1] - max(shape[-1] // 4, 1) :] = 0
        return mask
    return rng.choice(array.ravel(), shape).astype(array.dtype)


def random_forward(case: Case, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
    """Forward inputs at batch x seq: the first symbolic dim of the inputs is the batch, the second the sequence, any
    further one is another sequence, one shorter each. A model may have a batch only."""
    kinds = required_inputs(case.model)
    symbols = {name: [dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim] for name, kind in kinds.items()}
    named = list(dict.fromkeys(d.dim_param for k in kinds.values() for d in k.shape.dim if d.dim_param))
    if not named:
        raise ValueError("no symbolic dim on the inputs")
    rng = np.random.default_rng(seed)
    sizes = {name: batch if i == 0 else max(seq + 1 - i, 1) for i, name in enumerate(named)}
    own = case.group("in")
    return {name: resized(own[name], symbols[name], sizes, rng) for name in kinds}


def random_feeds(
    case: Case, graph: Path, forward: dict[str, np.ndarray], outputs: dict[str, np.ndarray], seed: int
) -> dict[str, np.ndarray]:
    """Completes `forward` to all inputs of `graph`: cotangents with the shapes of `outputs`, labels drawn from the
    case's.
    """
    rng = np.random.default_rng(seed)
    feeds = {}
    for name, kind in required_inputs(graph).items():
        dtype = ELEMENT[kind.elem_type]
        if name in forward | SEED:
            feeds[name] = (forward | SEED)[name]
        elif name.endswith(COTANGENT):
            out = outputs[name.removesuffix(COTANGENT)]
            feeds[name] = np.asarray(rng.standard_normal(out.shape) / max(out.size, 1) ** 0.5, dtype)
        elif name == "labels":
            tokens = next(v for v in forward.values() if v.dtype == np.int64 and v.ndim == 2)
            feeds[name] = rng.choice(case.labels().ravel(), tokens.shape).astype(dtype)
        else:
            raise ValueError(f"no rule for the input {name}")
    return feeds
