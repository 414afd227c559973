"""Compares adapters beside quantised weights in ONNX Runtime, with its default optimizations and without, with PyTorch.

    python tools qlora --ckpt-opt BINARY

Every form of the fixture (MatMulNBits, DequantizeLinear by block and by column, NF4) becomes a training graph, unplanned and with
full recomputation. ONNX Runtime runs it with the adapters of the fixture. Loss, scores and gradients of the adapters must agree
with PyTorch's on the dequantised weights (tolerance.py). Exit code 0 if all do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tools.lib import options
from tools.lib.compiler import Compiler
from tools.lib.onnx_runtime import OPTIMISED, UNOPTIMISED, run_ort
from tools.lib.tolerance import Worst, compare, largest, pick

FIXTURE = options.FIXTURES / "qlora"
FORMS = ("nbits", "blocked", "channel", "nf4")
ADAPTERS = "r=4,alpha=8,targets=q_proj,v_proj,down_proj"


def with_adapters(file: Path, adapters: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Returns a training graph with other numbers in its adapters: `--lora` starts with zeros."""
    model = onnx.load(file)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, numbers in adapters.items():
        stored[name].CopyFrom(numpy_helper.from_array(numbers, name))
    return model


def judge(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> Worst:
    """Compares what ONNX Runtime computed with the tensors of a form."""
    gradients = {f"{name}.grad": tensor for name, tensor in truth.items() if ".lora_" in name}
    results = {"loss": truth["loss.causal_lm"], "logits": truth["out.logits"]}
    return pick([compare(found, gradients, largest(gradients)), compare(found, results)])


def main() -> int:
    compiler = Compiler(options.with_binary(__doc__).parse_args().ckpt_opt)
    case = dict(np.load(FIXTURE / "case.npz"))
    adapters = {name: tensor for name, tensor in case.items() if ".lora_" in name}
    feeds = {name.removeprefix("in."): tensor for name, tensor in case.items() if name not in adapters}
    failed = 0
    for form in FORMS:
        truth = dict(np.load(FIXTURE / f"{form}.npz"))
        for policy in ("none", "full"):
            with tempfile.TemporaryDirectory() as folder:
                train = Path(folder) / "train.onnx"
                words = ("--policy", policy, "--loss", "causal-lm", "--lora", ADAPTERS)
                compiler.call(FIXTURE / f"{form}.onnx", "-o", train, *words)
                model = with_adapters(train, adapters)
            packed = sum(node.op_type.startswith("Dequantize_") for node in model.graph.node)
            levels = {"default": OPTIMISED, "unoptimised": UNOPTIMISED}
            for name, level in levels.items():
                worst = judge(run_ort(model, feeds, level), truth)
                good = worst.agrees and packed > 0
                failed += not good
                print(
                    f"{'pass' if good else 'fail'}  {form:8} {policy:5} {name:12} {packed:3} dequantised, worst {worst}"
                )
    return 1 if failed else 0
