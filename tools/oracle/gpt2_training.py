"""Trains GPT-2 small with PyTorch and with `ckpt-opt train` on the same text, and fine-tunes the result by LoRA on another one.

    python tools gpt2_training --ckpt-opt BINARY --folder DIR [--steps 300] [--page FILE.md --picture FILE.svg]

The model has 124 million parameters and starts from random numbers. The text is the source of Python's own library, as tokens of
a byte-pair encoding that is trained on it. Both sides read the same tokens in the same order and train in float32 with AdamW, a
cosine schedule with warm-up, gradients clipped to a global norm of 1, and no decay on norms and biases. The norm that PyTorch clips
by is summed in float64: its own, in float32, misses up to 1e-3 of it, by which the losses would differ by 4e-3 within 50 steps. Our
budget is half of what the unplanned step takes above parameters and optimizer states, so the gradients, which clipping holds, are in it.

Then adapters are trained on prose, the help texts of Python's language reference. The loss on held-out prose has to fall, the
weights without adapters stay as they were, and PyTorch has to find the same loss with the merged weights.

What `--folder` holds already is not computed again: the texts, the exported model, and the metrics of each run.
Exit code 1 if a condition fails; the page lists all of them. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.lib import options, page, results
from tools.lib.chart import Axis, Curve, chart
from tools.lib.compiler import Compiler
from tools.lib.models import PREFIX, build, export
from tools.lib.results import Row
from tools.oracle.training import cosine, groups, loss_of

VOCABULARY = 8192
TEXT_BYTES, HELD_OUT_TOKENS = 4_000_000, 8192
BATCH, SEQUENCE = 8, 128
LEARNING_RATE, WARM_UP, WEIGHT_DECAY, CLIP = 3e-4, 20, 0.1, 1.0
BUDGET = "50%"
CLOSE_STEPS, CLOSE, EVALUATION = 50, 1e-3, 0.01
ADAPTERS, RANK, ALPHA = ("c_attn", "c_proj", "c_fc"), 16, 32
MERGED = 1e-6
"""Largest relative difference of a merged weight, whose product is computed in float32."""
ADAPTER_STEPS, ADAPTER_RATE, ADAPTER_EVALUATION = 40, 2e-3, 1e-4


def write_texts(folder: Path) -> None:
    """Writes the tokens of both texts, to train on and held out, and the tokenizer that made them."""
    library = Path(sysconfig.get_path("stdlib"))
    source = "\n".join(file.read_text(errors="replace") for file in sorted(library.glob("*.py")))[:TEXT_BYTES]
    prose = "\n".join(importlib.import_module("pydoc_data.topics").topics.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(source.splitlines(keepends=True), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, text in (("source", source), ("prose", prose)):
        tokens = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
        tokens[-HELD_OUT_TOKENS:].tofile(folder / f"{name}_held_out.bin")
        tokens[:-HELD_OUT_TOKENS].tofile(folder / f"{name}.bin")


def batches(path: Path) -> torch.Tensor:
    """Returns all whole batches of a file, in its order."""
    tokens = np.fromfile(path, dtype=np.uint16).astype(np.int64)
    size = BATCH * SEQUENCE
    return torch.from_numpy(tokens[: len(tokens) // size * size]).reshape(-1, BATCH, SEQUENCE)


def evaluate(module: torch.nn.Module, path: Path) -> float:
    """Returns the mean loss on held-out text."""
    with torch.no_grad():
        losses = [loss_of(module, batch).item() for batch in batches(path)]
    return sum(losses) / len(losses)


def norms(parameters: list[torch.nn.Parameter]) -> Row:
    """Returns the norm of all gradients, and what PyTorch finds in float32: on the CPU its sum of many squares is inexact."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    each = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    exact = torch.linalg.vector_norm(torch.stack(each))
    return {"grad_norm": exact.item(), "float32_norm": torch.nn.utils.get_total_norm(gradients).item()}


def train_in_pytorch(module: torch.nn.Module, folder: Path, steps: int) -> list[Row]:
    """Trains, and returns a row for each step; the last one has the loss on held-out text, too."""
    optimizer = torch.optim.AdamW(groups(module), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, WARM_UP, steps))
    rows: list[Row] = []
    for step, batch in enumerate(batches(folder / "source.bin")[:steps], start=1):
        start = time.monotonic()
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        parameters = list(module.parameters())
        row = {"step": step, "loss": loss.item(), "lr": schedule.get_last_lr()[0], **norms(parameters)}
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, torch.tensor(row["grad_norm"]))
        optimizer.step()
        schedule.step()
        rows.append(row | {"seconds": time.monotonic() - start})
        print(f"PyTorch: step {step} of {steps}, loss {row['loss']:.4f}", file=sys.stderr, flush=True)
    rows[-1]["eval_loss"] = evaluate(module, folder / "source_held_out.bin")
    return rows


def train(
    compiler: Compiler, folder: Path, start: str, text: str, out: str, steps: int, *more: str | float
) -> list[Row]:
    """Trains by the binary into `out`, or goes on where it stopped, and returns the metrics."""
    metrics = folder / out / "metrics.jsonl"
    if not (folder / out / "model.safetensors").exists():
        compiler.call(
            "train", folder / f"{start}.onnx", "--out", folder / out, "--resume", "--loss", "causal-lm", "--budget", BUDGET,
            "--dim", f"batch={BATCH}", "--dim", f"seq={SEQUENCE}", "--shuffle", "off", "--steps", steps,
            "--data", folder / f"{text}.bin", "--eval-data", folder / f"{text}_held_out.bin",
            "--save-every", 100, "--keep", 1, "--quiet", *more,
        )  # fmt: skip
    return results.read(metrics)


def train_by_us(compiler: Compiler, folder: Path, steps: int) -> list[Row]:
    """Does what `train_in_pytorch` does."""
    return train(
        compiler, folder, "model", "source", "trained", steps, "--optimizer", "adamw", "--lr", LEARNING_RATE,
        "--weight-decay", WEIGHT_DECAY, "--schedule", "cosine", "--warmup", WARM_UP, "--clip", CLIP,
    )  # fmt: skip


def adapt(compiler: Compiler, folder: Path) -> list[Row]:
    """Trains adapters on prose, from the weights of `train_by_us`."""
    if not (folder / "trained.onnx").exists():
        weights = folder / "trained" / "model.safetensors"
        compiler.call("convert", folder / "model.onnx", weights, "--to", "onnx", "-o", folder / "trained.onnx")
    lora = f"r={RANK},alpha={ALPHA},targets={','.join(ADAPTERS)}"
    return train(
        compiler, folder, "trained", "prose", "adapted", ADAPTER_STEPS, "--lora", lora, "--optimizer", "adamw",
        "--lr", ADAPTER_RATE,
    )  # fmt: skip


def memory(compiler: Compiler, folder: Path) -> tuple[int, int]:
    """Returns what the unplanned step takes above parameters and states, and what those take, in bytes."""
    plan = compiler.call_json(
        "plan", folder / "model.onnx", "--loss", "causal-lm", "--drop-output", "*", "--policy", "none", "--optimizer", "adamw",
        "--clip", CLIP, "--dim", f"batch={BATCH}", "--dim", f"seq={SEQUENCE}",
    )  # fmt: skip
    return plan["peak_above_static_before_bytes"], plan["static_bytes"]


def compare(ours: list[Row], theirs: list[Row], unplanned: tuple[int, int]) -> tuple[list[str], list[str]]:
    """Returns the rows of the table, and what is wrong."""
    differences = [abs(our["loss"] - their["loss"]) for our, their in zip(ours, theirs, strict=True)]
    close = max(differences[:CLOSE_STEPS])
    above, static = unplanned
    peak = max(row["peak_bytes"] for row in ours)
    evaluations = theirs[-1]["eval_loss"], ours[-1]["eval_loss"]
    farthest = max(abs(row["float32_norm"] / row["grad_norm"] - 1) for row in theirs)
    norm = max(
        abs(our["grad_norm"] / their["grad_norm"] - 1) for our, their in zip(ours[:CLOSE_STEPS], theirs, strict=False)
    )
    lines = [
        f"| loss of the first step | {theirs[0]['loss']:.6f} | {ours[0]['loss']:.6f} |",
        f"| largest difference of a loss, steps 1 to {CLOSE_STEPS} | | {close:.1e} |",
        f"| the same, all {len(ours)} steps | | {max(differences):.1e} |",
        f"| largest relative error of a norm of the gradients: in float32, and against float64 in steps 1 to {CLOSE_STEPS} "
        f"| {farthest:.1e} | {norm:.1e} |",
        f"| mean loss of the last 20 steps | {mean(theirs[-20:]):.4f} | {mean(ours[-20:]):.4f} |",
        f"| loss on held-out text | {evaluations[0]:.4f} | {evaluations[1]:.4f} |",
        f"| peak above parameters and states, unplanned and planned | | {above / 2**20:.0f} and {(peak - static) / 2**20:.0f} MiB |",
        f"| largest difference of a measured from the predicted peak | | {surprise(ours)} B |",
    ]
    wrong = []
    if close > CLOSE:
        wrong.append(f"a loss of the first {CLOSE_STEPS} steps differs by {close:.1e}, more than {CLOSE:.0e}")
    if abs(evaluations[1] - evaluations[0]) > EVALUATION * evaluations[0]:
        wrong.append(f"the losses on held-out text differ by more than {EVALUATION:.0%}")
    if surprise(ours) or peak - static > above / 2:
        wrong.append("the measured peak is not the predicted one, or above the budget")
    return lines, wrong


def mean(rows: list[Row]) -> float:
    return sum(row["loss"] for row in rows) / len(rows)


def surprise(rows: list[Row]) -> int:
    """Returns by how many bytes a measured peak differs from the predicted one."""
    return max(abs(row["peak_bytes"] - row["predicted_peak_bytes"]) for row in rows)


def judge_adapters(layers: int, folder: Path, adapted: list[Row]) -> tuple[list[str], list[str]]:
    """Returns the rows of the table, and what is wrong."""
    base = load_file(folder / "trained" / "model.safetensors")
    merged = load_file(folder / "adapted" / "model.safetensors")
    adapter = load_file(folder / "adapted" / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model."
    modules = {key.removeprefix(prefix).rsplit(".lora_", 1)[0] for key in adapter}
    others = [key for key in base if key.rsplit(".", 1)[0] not in modules]
    changed = [key for key in others if not torch.equal(base[key], merged[key])]
    worst = 0.0
    for module in modules:
        a, b = (adapter[f"{prefix}{module}.lora_{side}.weight"].double() for side in "AB")
        delta = (ALPHA / RANK * b @ a).T  # GPT-2 stores the weights of its layers transposed.
        weight = f"{module}.weight"
        exact = base[weight].double() + delta
        worst = max(worst, ((merged[weight].double() - exact).abs().max() / exact.abs().max()).item())
    held_out = folder / "prose_held_out.bin"
    before = evaluate(load(layers, folder / "trained" / "model.safetensors"), held_out)
    after = evaluate(load(layers, folder / "adapted" / "model.safetensors"), held_out)
    by_adapter = adapted[-1]["eval_loss"]
    lines = [
        f"| adapters | {len(modules)} |",
        f"| loss on held-out prose before, by PyTorch | {before:.4f} |",
        f"| after {len(adapted)} steps, adapters beside the weights | {by_adapter:.4f} |",
        f"| after, merged weights, by PyTorch | {after:.4f} |",
        f"| weights without adapters that changed | {len(changed)} of {len(others)} |",
        f"| largest relative difference of a merged weight from W + scale·B·A | {worst:.1e} |",
        f"| largest difference of a measured from the predicted peak | {surprise(adapted)} B |",
    ]
    wrong = [f"{key} changed, and has no adapter" for key in changed]
    if not by_adapter < before:
        wrong.append("adapters do not lower the loss on held-out prose")
    if abs(after - by_adapter) > ADAPTER_EVALUATION * by_adapter:
        wrong.append("merged weights have another loss than adapters")
    if worst > MERGED or surprise(adapted):
        wrong.append("a merged weight or a measured peak is not what it should be")
    return lines, wrong


def model(layers: int) -> torch.nn.Module:
    return build("gpt2", torch.float32, n_layer=layers)


def load(layers: int, path: Path) -> torch.nn.Module:
    """Returns the model with the weights of a file."""
    loaded = model(layers)
    loaded.load_state_dict({key.removeprefix(PREFIX): value for key, value in load_file(path).items()}, strict=True)
    return loaded


def picture(ours: list[Row], theirs: list[Row]) -> str:
    """Draws both curves of losses over steps as SVG."""

    def points(rows: list[Row]) -> list[tuple[float, float]]:
        return [(row["step"], row["loss"]) for row in rows]

    most = int(max(row["loss"] for row in [*ours, *theirs]))
    curves = [
        Curve("PyTorch, eager", "#bbb", points(theirs), stroke=5),
        Curve(f"ckpt-opt train --budget {BUDGET}", "#b3261e", points(ours), stroke=1.5),
    ]
    return chart(
        curves,
        Axis("step", [(step, str(step)) for step in range(0, len(ours) + 1, max(1, len(ours) // 6))]),
        Axis("loss", [(loss, str(loss)) for loss in range(0, most + 1, 2)]),
    )


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where texts, models and metrics are kept")
    options.add_counts(parser, steps=300, layers=12, threads=2)
    parser.add_argument("--page", type=Path, metavar="FILE.md")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(given.threads)
    if not (folder / "tokenizer.json").exists():
        write_texts(folder)
    if not (folder / "model.onnx").exists():
        export(model(given.layers), folder / "model.onnx")
    stored = folder / "pytorch.jsonl"
    if not stored.exists():
        rows = train_in_pytorch(model(given.layers), folder, given.steps)
        results.append(stored, rows)
    theirs = results.read(stored)[: given.steps]
    compiler = Compiler(given.ckpt_opt, timeout_s=86_400)
    ours = train_by_us(compiler, folder, given.steps)
    adapted = adapt(compiler, folder)
    if given.picture:
        given.picture.write_text(picture(ours, theirs))
    lines, wrong = compare(ours, theirs, memory(compiler, folder))
    more_lines, more_wrong = judge_adapters(given.layers, folder, adapted)
    head = page.head(f"PyTorch {torch.__version__}", given.threads, f"batches of {BATCH} × {SEQUENCE} tokens, float32")
    lines = [
        head,
        "",
        "| | PyTorch | ours |",
        "|---|--:|--:|",
        *lines,
        "",
        "| LoRA on another text | |",
        "|---|--:|",
        *more_lines,
    ]
    if given.picture:
        lines += ["", f"![Losses of both runs](pictures/{given.picture.name})"]
    print("\n".join(lines))
    return page.finish("GPT-2 small trained from random numbers", lines, [], [*wrong, *more_wrong], given.page)


if __name__ == "__main__":
    raise SystemExit(main())
