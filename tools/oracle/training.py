"""Compares `ckpt-opt train` with PyTorch's own training: weights after a step, and the curve.

    python tools training --ckpt-opt BINARY [--steps 50]

For each model of MODELS, on the same tokens in the same order and from the same weights:

- one step of SGD and one of AdamW in float32: `model.safetensors` loads with `load_state_dict(strict=True)`, and each
  parameter equals PyTorch's within 1e-5 of the tensor's largest element. The step of AdamW is judged where the gradient is
  not rounding, because its first step depends on the sign alone;
- a curve of AdamW with a cosine schedule, warm-up and clipped gradients: the loss of each step within 1e-3, the learning rates equal.

A GPT-2 of 128 columns, whose weights are large enough for states of eight bits, trains by adamw8bit and by adamw: the mean loss of
the last tenth of the steps differs by at most 1 %.

Needs tools/requirements-torch.txt. Exit code 0 if all agree.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fixtures.make import gpt2_model, llama_model
from tools.lib import options
from tools.lib.compiler import Compiler
from tools.lib.models import build, export

MODELS = {"gpt2": gpt2_model, "llama32": llama_model}
BATCH, SEQUENCE, VOCABULARY, FIRST = 4, 16, 347, 3
WEIGHT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-3
CLIP = 0.5
EIGHT_BITS = dict(n_embd=128, n_inner=512, n_layer=2)
EIGHT_BITS_STEPS = 200
EIGHT_BITS_TOLERANCE = 0.01
NOISE = 1e-6
"""Gradients below this share of the largest one are rounding."""


def tokens(steps: int) -> np.ndarray:
    """Returns text-like tokens: each is likely to follow from the one before it. From 3 on: PyTorch's embedding has no
    gradient for padding, which no exported graph can express."""
    random = np.random.default_rng(1)
    ids = [FIRST]
    for _ in range(steps * BATCH * SEQUENCE - 1):
        follows = random.random() < 0.7
        next_id = FIRST + ids[-1] * 7 % (VOCABULARY - FIRST)
        ids.append(next_id if follows else int(random.integers(FIRST, VOCABULARY)))
    return np.array(ids, dtype=np.int32)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def cosine(step: int, warmup: int, steps: int) -> float:
    """Returns the share of the learning rate in a step, as `get_cosine_schedule_with_warmup` of transformers does."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def batches(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).reshape(-1, BATCH, SEQUENCE)


def train(compiler: Compiler, model: Path, folder: Path, ids: np.ndarray, *more: str) -> Path:
    """Trains a model on tokens in their order. Returns the folder of the run."""
    np.save(folder / "tokens.npy", ids)
    out = folder / "out"
    compiler.call(
        "train", model, "--data", folder / "tokens.npy", "--shuffle", "off", "--out", out,
        "--loss", "causal-lm", "--dim", f"batch={BATCH}", "--dim", f"seq={SEQUENCE}", "--policy", "full", "--quiet", *more,
    )  # fmt: skip
    return out


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns the parameters as `train` groups them: norms and biases do not decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]


def compare_step(compiler: Compiler, name: str, optimizer: str, lr: float) -> float:
    """Returns the largest difference of a parameter after one step, relative to its largest element."""
    ids = tokens(1)
    with tempfile.TemporaryDirectory() as folder:
        out = train(
            compiler, fixture(name), Path(folder), ids, "--optimizer", optimizer, "--lr", str(lr), "--steps", "1"
        )
        loaded = MODELS[name]()
        loaded.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    model = MODELS[name]()
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    steps = make(groups(model) if optimizer == "adamw" else model.parameters(), lr=lr)
    loss_of(model, batches(ids)[0]).backward()
    steps.step()
    worst = 0.0
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        gradient = theirs.grad.abs()
        judged = gradient > NOISE * gradient.max() if optimizer == "adamw" else torch.ones_like(gradient, dtype=bool)
        difference = ((ours - theirs).abs() * judged).max() / theirs.abs().max()
        worst = max(worst, difference.item())
    return worst


def fixture(name: str) -> Path:
    return options.FIXTURES / name / "model.onnx"


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def compare_eight_bits(compiler: Compiler) -> float:
    """Returns the share by which states of eight bits change the loss at the end."""
    steps, ids = EIGHT_BITS_STEPS, tokens(EIGHT_BITS_STEPS)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        export(build("tiny", torch.float32, **EIGHT_BITS), model)
        for optimizer in ("adamw", "adamw8bit"):
            own = Path(folder) / optimizer
            own.mkdir()
            more = ("--optimizer", optimizer, "--lr", "2e-3", "--schedule", "cosine", "--warmup", "20", "--epochs", "1")
            metrics = metrics_of(train(compiler, model, own, ids, *more))
            assert metrics[0]["peak_bytes"] == metrics[0]["predicted_peak_bytes"], "the peak is not the predicted one"
            last = [row["loss"] for row in metrics[-steps // 10 :]]
            losses.append(sum(last) / len(last))
            print(f"{optimizer}: loss {metrics[0]['loss']:.4f} -> {losses[-1]:.4f}, peak {metrics[0]['peak_bytes']}")
    return abs(losses[1] / losses[0] - 1.0)


def compare_curve(compiler: Compiler, name: str, steps: int) -> tuple[float, float]:
    """Returns the largest differences of a step's loss and learning rate."""
    ids, lr, warmup = tokens(steps), 1e-2, steps // 10
    with tempfile.TemporaryDirectory() as folder:
        more = ("--optimizer", "adamw", "--lr", str(lr), "--schedule", "cosine", "--warmup", str(warmup), "--epochs", "1",
                "--clip", str(CLIP))  # fmt: skip
        metrics = metrics_of(train(compiler, fixture(name), Path(folder), ids, *more))
    assert len(metrics) == steps, f"{len(metrics)} steps instead of {steps}"
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(groups(model), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, warmup, steps))
    worst_loss = worst_rate = 0.0
    for batch, step in zip(batches(ids), metrics, strict=True):
        worst_rate = max(worst_rate, abs(step["lr"] - schedule.get_last_lr()[0]))
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        worst_loss = max(worst_loss, abs(step["loss"] - loss.item()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
    print(f"{name}: loss {metrics[0]['loss']:.3f} -> {metrics[-1]['loss']:.3f}, PyTorch {loss.item():.3f}")
    return worst_loss, worst_rate


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    compiler = Compiler(args.ckpt_opt)
    failures = 0
    for name in MODELS:
        for optimizer, lr in (("sgd", 0.5), ("adamw", 1e-3)):
            worst = compare_step(compiler, name, optimizer, lr)
            failures += worst > WEIGHT_TOLERANCE
            print(f"{name}: one step of {optimizer}: largest relative difference {worst:.1e} of {WEIGHT_TOLERANCE:.0e}")
        worst_loss, worst_rate = compare_curve(compiler, name, args.steps)
        failures += worst_loss > LOSS_TOLERANCE
        failures += worst_rate > 1e-12
        print(
            f"{name}: {args.steps} steps: loss differs by {worst_loss:.1e} of {LOSS_TOLERANCE:.0e}, rate by {worst_rate:.1e}"
        )
    change = compare_eight_bits(compiler)
    failures += change > EIGHT_BITS_TOLERANCE
    print(f"adamw8bit: {EIGHT_BITS_STEPS} steps: loss differs by {change:.2%} of {EIGHT_BITS_TOLERANCE:.0%}")
    print("all agree" if failures == 0 else f"{failures} differ")
    return 1 if failures else 0
