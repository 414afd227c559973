"""Compares training in floats of 8 bits in ONNX Runtime, with its default optimizations and without, with PyTorch.

    python tools float8 --ckpt-opt BINARY

Every form of the fixture (scales of the same step, scales as inputs, numbers beyond the largest, frozen weights) becomes a training
graph, unplanned and with full recomputation, which the ONNX checker accepts. Loss, outputs and gradients in ONNX Runtime must agree
with PyTorch's (tolerance.py). Exit code 0 if all do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

from tools.lib import options
from tools.lib.compiler import Compiler
from tools.lib.onnx_runtime import OPTIMISED, UNOPTIMISED, run_ort
from tools.lib.tolerance import compare, largest, pick

FIXTURE = options.FIXTURES / "float8"
FORMS = ("current", "delayed", "wide", "stored")


def main() -> int:
    compiler = Compiler(options.with_binary(__doc__).parse_args().ckpt_opt)
    failed = 0
    for form in FORMS:
        case = dict(np.load(FIXTURE / f"{form}.npz"))
        group = {
            p: {k.removeprefix(p): v for k, v in case.items() if k.startswith(p)} for p in ("in.", "out.", "grad.")
        }
        gradients = {f"{name}.grad": tensor for name, tensor in group["grad."].items()}
        for policy in ("none", "full"):
            with tempfile.TemporaryDirectory() as folder:
                train = Path(folder) / "train.onnx"
                compiler.call(FIXTURE / f"{form}.onnx", "-o", train, "--policy", policy, "--loss", "output:loss")
                model = onnx.load(train)
            onnx.checker.check_model(model, full_check=True)
            for name, level in {"default": OPTIMISED, "unoptimised": UNOPTIMISED}.items():
                found = run_ort(model, group["in."], level)
                worst = pick([compare(found, gradients, largest(gradients)), compare(found, group["out."])])
                failed += not worst.agrees
                print(f"{'pass' if worst.agrees else 'fail'}  {form:8} {policy:5} {name:12} worst {worst}")
    return 1 if failed else 0
