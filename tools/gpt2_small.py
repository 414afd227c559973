#!/usr/bin/env python3
"""GPT-2 small, fused and not: peak and time of one training step, and how far the gradients are apart.

    python tools/gpt2_small.py --ckpt-opt BINARY [--batch 4] [--seq 512] [--layers 12] [--threads 1] [--steps 3]
        [--model FILE]

Builds the model from its configuration with random weights (no network), exports it, or takes FILE, an export made so
before; compiles it with `--policy none` with and without fusion, and runs both on the same tokens. Time is CPU seconds
of the process, of which the time to start is taken off, so that other load on the machine counts little. Needs
tools/requirements-torch.txt. Exit 1 if fusion does not lower the peak by at least the bytes of the attention scores, if
the fused step takes longer, if a measured peak is not the predicted one, or if a gradient is off by more than
tolerance.py allows two float32 programs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tolerance
from compiler import Compiler, read_tensors

HEADS = 12
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Measured:
    peak_bytes: int
    predicted_bytes: int
    step_cpu_s: float
    results: dict[str, np.ndarray]


def export(path: Path, layers: int, batch: int, seq: int) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        # Norms start as ones and biases as zeros: the exporter would merge those that are equal.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    program = torch.onnx.export(
        Logits(), (), kwargs={"input_ids": torch.zeros((batch, seq), dtype=torch.int64)}, dynamo=True, opset_version=18,
        dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}}, input_names=["input_ids"], output_names=["logits"],
        verbose=False,
    )  # fmt: skip
    program.save(str(path), external_data=True)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(compiler: Compiler, planned: Path, arguments: argparse.Namespace) -> Measured:
    def run(steps: int, *more: str | Path) -> tuple[dict, float]:
        before = cpu_s()
        dims = ("--dim", f"batch={arguments.batch}", "--dim", f"seq={arguments.seq}")
        counts = ("--threads", str(arguments.threads), "--steps", str(steps))
        report = compiler.call_json("run", planned, "--seed", "1", *dims, *counts, *more)
        return report, cpu_s() - before

    _, one_s = run(1)
    report, all_s = run(1 + arguments.steps)
    outputs = planned.with_suffix(".npz")
    run(1, "--outputs", outputs)
    step_s = (all_s - one_s) / arguments.steps
    return Measured(report["measured_peak_bytes"], report["predicted_peak_bytes"], step_s, read_tensors(outputs))


def judge(fused: Measured, plain: Measured, scores_bytes: int) -> list[str]:
    """What does not hold."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    for option, default in (("batch", 4), ("seq", 512), ("layers", 12), ("threads", 1), ("steps", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    binary = arguments.ckpt_opt.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model
        if model is None:
            model = folder / "model.onnx"
            export(model, arguments.layers, arguments.batch, arguments.seq)
        measured = {}
        for label, options in (("fused", ()), ("not fused", ("--no-fuse",))):
            compiler = Compiler(binary, 3600.0, ("--drop-output", "logits", *options))
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


if __name__ == "__main__":
    sys.exit(main())
