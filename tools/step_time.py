#!/usr/bin/env python3
"""A training step of ours against PyTorch eager: the same model, sizes and threads, in turns.

    python tools/step_time.py --ckpt-opt BINARY [--model gpt2|bert|tiny] [--batch 1] [--seq 16] [--threads 1]
        [--rounds 5] [--steps 20] [--policy none] [--checkpoint] [--compile]

Builds the model from its configuration with random weights (no network), exports it, and compiles it with `--policy`.
Then, round after round, runs `--steps` steps of ours and as many of each PyTorch variant: forward, loss and the
gradients of all parameters. What is compared is the time that the machine spends on a step (CPU time of the process,
so that other load counts little) and the time that passes. Ours comes from `run`, which reports both for its median
step. Printed: medians over the rounds, the ratio of each round's medians to eager's (median, least, largest), the
peaks of ours. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from compiler import Compiler

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TINY = dict(vocab_size=347, n_positions=128, n_embd=24, n_layer=2, n_head=4, n_inner=40, bos_token_id=0, eos_token_id=0)

# Model class, configuration, loss as `--loss` names it.
MODELS: dict[str, tuple[type, tf.PretrainedConfig, str]] = {
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(use_cache=False, **NO_DROPOUT), "causal-lm"),
    "tiny": (tf.GPT2LMHeadModel, tf.GPT2Config(use_cache=False, **NO_DROPOUT, **TINY), "causal-lm"),
    "bert": (
        tf.BertForMaskedLM,
        tf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "cross-entropy",
    ),
}


def built(name: str) -> torch.nn.Module:
    model_class, config, _ = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        # Norms start as ones and biases as zeros: the exporter would merge those that are equal.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def export(model: torch.nn.Module, path: Path, batch: int, seq: int) -> None:
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    # Sizes of 1 would be taken for constants.
    tokens = torch.zeros((max(batch, 2), max(seq, 2)), dtype=torch.int64)
    program = torch.onnx.export(
        Logits(), (), kwargs={"input_ids": tokens}, dynamo=True, opset_version=18, input_names=["input_ids"],
        dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}}, output_names=["logits"], verbose=False,
    )  # fmt: skip
    program.save(str(path), external_data=True)


def eager_step(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def timed(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Medians of CPU and wall microseconds."""
    cpu, wall = [], []
    for _ in range(steps):
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        step()
        cpu.append((time.process_time_ns() - cpu_ns) / 1e3)
        wall.append((time.perf_counter_ns() - wall_ns) / 1e3)
    return statistics.median(cpu), statistics.median(wall)


def variants(arguments: argparse.Namespace, model: torch.nn.Module) -> dict[str, Callable[[], None]]:
    tokens = torch.randint(3, model.config.vocab_size, (arguments.batch, arguments.seq))
    steps = {"eager": eager_step(model, tokens)}
    if arguments.checkpoint:
        other = built(arguments.model).train()
        other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        steps["eager, a checkpoint a layer"] = eager_step(other, tokens)
    if arguments.compile:
        steps["torch.compile"] = eager_step(torch.compile(built(arguments.model)), tokens)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt2")
    for option, default in (("batch", 1), ("seq", 16), ("threads", 1), ("rounds", 5), ("steps", 20)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--policy", default="none")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = built(arguments.model)
    loss = MODELS[arguments.model][2]
    with tempfile.TemporaryDirectory() as name:
        exported, planned = Path(name) / "model.onnx", Path(name) / "step.onnx"
        export(model, exported, arguments.batch, arguments.seq)
        compiler = Compiler(arguments.ckpt_opt.resolve(), 3600.0, ("--drop-output", "logits"))
        compiler.optimize(exported, planned, arguments.policy, loss)
        torches = variants(arguments, model)
        for step in torches.values():
            timed(step, 2)
        figures: dict[str, list[tuple[float, float]]] = {label: [] for label in ("ours", *torches)}
        report = {}
        for _ in range(arguments.rounds):
            report = compiler.call_json(
                "run", planned, "--seed", "1", "--dim", f"batch={arguments.batch}", "--dim", f"seq={arguments.seq}",
                "--threads", str(arguments.threads), "--steps", str(arguments.steps),
            )  # fmt: skip
            figures["ours"].append((report["step_cpu_us"], report["step_time_us"]))
            for label, step in torches.items():
                figures[label].append(timed(step, arguments.steps))
    print(f"{arguments.model} {arguments.batch} x {arguments.seq}, {arguments.threads} threads, {torch.__version__}")
    for label, rounds in figures.items():
        columns = []
        for kind, name in ((0, "CPU"), (1, "wall")):
            ratios = [r[kind] / e[kind] for r, e in zip(rounds, figures["eager"], strict=True)]
            columns.append(
                f"{statistics.median(r[kind] for r in rounds) / 1e3:10.3f} ms {name}, "
                f"{statistics.median(ratios):.2f} of eager ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(f"{label:>28}: {'; '.join(columns)}")
    print(f"peak of ours: {report['measured_peak_bytes']} B, predicted {report['predicted_peak_bytes']} B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
