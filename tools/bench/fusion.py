"""Measures GPT-2 small with and without fusion: peak and time of a training step, and distance of the gradients.

    python tools fusion --ckpt-opt BINARY [--batch 4] [--seq 512] [--layers 12] [--threads 1] [--steps 3]
        [--model FILE]

Builds the model from its configuration with random weights (no network) and exports it, or takes FILE, an earlier export.
Compiles it with `--policy none`, with and without fusion, and runs both on the same tokens. Time is CPU seconds of the
process without its start, so that other load on the machine counts little. Needs tools/requirements-torch.txt. Exit code
1 if fusion lowers the peak by less than the bytes of the attention scores, if the fused step takes longer, if a measured
peak differs from the predicted one, or if a gradient exceeds the float32 tolerance of tolerance.py.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.lib import models, options, tolerance
from tools.lib.compiler import Compiler, children_cpu_s, read_tensors

HEADS = 12
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Measured:
    peak_bytes: int
    predicted_bytes: int
    step_cpu_s: float
    results: dict[str, np.ndarray]


def measure(compiler: Compiler, planned: Path, arguments: argparse.Namespace) -> Measured:
    def run(steps: int, *more: str | Path) -> tuple[dict, float]:
        before = children_cpu_s()
        dims = options.dim_options({"batch": arguments.batch, "seq": arguments.seq})
        counts = ("--threads", str(arguments.threads), "--steps", str(steps))
        report = compiler.call_json("run", planned, "--seed", "1", *dims, *counts, *more)
        return report, children_cpu_s() - before

    _, one_s = run(1)
    report, all_s = run(1 + arguments.steps)
    outputs = planned.with_suffix(".npz")
    run(1, "--outputs", outputs)
    step_s = (all_s - one_s) / arguments.steps
    return Measured(report["measured_peak_bytes"], report["predicted_peak_bytes"], step_s, read_tensors(outputs))


def judge(fused: Measured, plain: Measured, scores_bytes: int) -> list[str]:
    """Returns the criteria that fail."""
    wrong = []
    for name, m in (("fused", fused), ("not fused", plain)):
        if m.peak_bytes != m.predicted_bytes:
            wrong.append(f"{name}: {m.peak_bytes} B measured, {m.predicted_bytes} B predicted")
    if plain.peak_bytes - fused.peak_bytes < scores_bytes:
        wrong.append("fusion saves less than the scores take")
    if fused.step_cpu_s > plain.step_cpu_s:
        wrong.append("the fused step takes longer")
    gradients = {n: g for n, g in plain.results.items() if n.endswith(".grad")}
    worst = tolerance.compare(fused.results, gradients, tolerance.largest(gradients))
    print(f"gradients: {worst}")
    if not worst.agrees:
        wrong.append(f"gradients: {worst}")
    return wrong


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_counts(parser, batch=4, seq=512, layers=12, threads=1, steps=3)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model
        if model is None:
            model = folder / "model.onnx"
            models.export(models.build("gpt2", models.DTYPES["f32"], n_layer=arguments.layers), model)
        measured = {}
        for label, fusing in (("fused", ()), ("not fused", ("--fuse", "off"))):
            compiler = Compiler(arguments.ckpt_opt, 3600.0, ("--drop-output", "logits", *fusing))
            planned = folder / f"{label.replace(' ', '_')}.onnx"
            compiler.optimize(model, planned, "none", "causal-lm")
            measured[label] = m = measure(compiler, planned, arguments)
            print(f"{label}: peak {m.peak_bytes / 2**20:.0f} MiB, {m.step_cpu_s:.2f} CPU s a step", flush=True)
    scores_bytes = arguments.layers * arguments.batch * HEADS * arguments.seq**2 * FLOAT_BYTES
    print(f"the scores of all layers: {scores_bytes / 2**20:.0f} MiB")
    wrong = judge(measured["fused"], measured["not fused"], scores_bytes)
    for line in wrong:
        print(f"fail: {line}")
    return 1 if wrong else 0
