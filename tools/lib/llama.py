"""Models of the Llama family as ONNX files whose weights are not there, for planning. Neither PyTorch nor a download is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

WEIGHTS = "weights.bin"
"""The file of weights that a model names."""
SMALL_BYTES = 1 << 16
"""Constants up to this size are stored in the model."""


@dataclass(frozen=True)
class Llama:
    """Sizes of a model, by the names that its configuration has on the Hugging Face hub."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    vocabulary: int = 128256

    def parameters(self) -> int:
        kv = self.kv_heads * self.head_dim
        layer = self.hidden * (2 * self.heads * self.head_dim + 2 * kv + 3 * self.intermediate + 2)
        return self.layers * layer + self.hidden * (1 + self.vocabulary * (1 if self.tied else 2))


LLAMAS = {
    model.name: model
    for model in (
        Llama("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, tied=True),
        Llama("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128),
        Llama("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128),
        Llama("Llama-3.1-405B", 16384, 53248, 126, 128, 8, 128),
    )
}


class Writer:
    """Collects the nodes and weights of a graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.offset = 0

    def weight(self, name: str, *shape: int) -> str:
        """Adds a bfloat16 weight that lies in a file."""
        tensor = TensorProto(name=name, data_type=TensorProto.BFLOAT16, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        length = 2
        for size in shape:
            length *= size
        for key, value in (("location", WEIGHTS), ("offset", self.offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.offset += length
        self.weights.append(tensor)
        return name

    def constant(self, name: str, values: list[float] | list[int], kind: int, *shape: int) -> str:
        self.weights.append(helper.make_tensor(name, kind, shape or (len(values),), values))
        return name

    def op(self, kind: str, out: str, *ins: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, list(ins), [out], name=out, **attributes))
        return out


def write(model: Llama, path: Path) -> None:
    """Writes token ids [batch, seq] → logits [batch, seq, vocabulary] in bfloat16, in ops of opset 23."""
    w = Writer()
    half = model.head_dim // 2
    frequencies = [500000.0 ** (-2 * i / model.head_dim) for i in range(half)]
    w.constant("frequencies", frequencies, TensorProto.FLOAT, 1, half)
    w.constant("zero", [0], TensorProto.INT64, 1)
    w.constant("origin", [0], TensorProto.INT64)
    w.weights[-1].ClearField("dims")
    w.constant("one", [1], TensorProto.INT64)
    w.weights[-1].ClearField("dims")
    w.constant("column", [-1, 1], TensorProto.INT64)
    # Angles of the positions: the same in every layer.
    w.op("Shape", "length", "input_ids", start=1, end=2)
    w.op("Squeeze", "count", "length", "zero")
    w.op("Range", "positions", "origin", "count", "one")
    w.op("Cast", "floats", "positions", to=TensorProto.FLOAT)
    w.op("Reshape", "rows", "floats", "column")
    w.op("Mul", "angles", "rows", "frequencies")
    for name in ("cos", "sin"):
        w.op(name.capitalize(), f"{name}.wide", "angles")
        w.op("Cast", f"{name}.table", f"{name}.wide", to=TensorProto.BFLOAT16)
        w.op("Unsqueeze", name, f"{name}.table", "zero")
    stream = w.op("Gather", "embedded", w.weight("embed_tokens.weight", model.vocabulary, model.hidden), "input_ids")
    for i in range(model.layers):
        stream = layer(w, model, f"layers.{i}", stream)
    stream = norm(w, model, "norm", stream)
    if model.tied:
        head = w.op("Transpose", "head", "embed_tokens.weight", perm=[1, 0])
    else:
        head = w.weight("lm_head.weight", model.hidden, model.vocabulary)
    w.op("MatMul", "logits", stream, head)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"])
    logits = helper.make_tensor_value_info("logits", TensorProto.BFLOAT16, ["batch", "seq", model.vocabulary])
    graph = helper.make_graph(w.nodes, model.name, [ids], [logits], initializer=w.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), str(path))


def norm(w: Writer, model: Llama, name: str, x: str) -> str:
    scale = w.weight(f"{name}.weight", model.hidden)
    return w.op("RMSNormalization", name, x, scale, axis=-1, epsilon=1e-5, stash_type=TensorProto.FLOAT)


def layer(w: Writer, model: Llama, name: str, stream: str) -> str:
    """Appends a layer and returns the residual stream after it."""

    def linear(part: str, x: str, rows: int, columns: int) -> str:
        return w.op("MatMul", f"{name}.{part}", x, w.weight(f"{name}.{part}.weight", rows, columns))

    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    x = norm(w, model, f"{name}.input_layernorm", stream)
    q, k, v = (
        linear(f"{part}_proj", x, model.hidden, size) for part, size in (("q", wide), ("k", narrow), ("v", narrow))
    )
    q = w.op("RotaryEmbedding", f"{q}.rotated", q, "cos", "sin", num_heads=model.heads)
    k = w.op("RotaryEmbedding", f"{k}.rotated", k, "cos", "sin", num_heads=model.kv_heads)
    x = w.op(
        "Attention", f"{name}.attention", q, k, v, is_causal=1, q_num_heads=model.heads, kv_num_heads=model.kv_heads
    )
    stream = w.op("Add", f"{name}.attended", stream, linear("o_proj", x, wide, model.hidden))
    x = norm(w, model, f"{name}.post_attention_layernorm", stream)
    gate = linear("gate_proj", x, model.hidden, model.intermediate)
    up = linear("up_proj", x, model.hidden, model.intermediate)
    gate = w.op("Mul", f"{name}.silu", gate, w.op("Sigmoid", f"{name}.sigmoid", gate))
    x = linear("down_proj", w.op("Mul", f"{name}.gated", gate, up), model.intermediate, model.hidden)
    return w.op("Add", f"{name}.out", stream, x)
