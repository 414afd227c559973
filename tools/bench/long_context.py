"""Plans the longest sequences that Llama-3.1-8B trains on with one device, and runs the same plans on a small copy of it.

    python tools long_context --ckpt-opt BINARY [--row NAME,…] [--chunks 32] [--shrink 64] [--tokens 1024] [--page FILE.md]

The table is predicted, not run: the model is written in bfloat16 without weights (tools/lib/llama.py). The
sequence goes through it in chunks (`--tile-sequence`), the loss in chunks too; what does not fit on the device is offloaded to the host's
memory (`--offload cpu`). The budget is the memory of the device profile. Columns:

  peak            of the plan
  time            of the step over the unplanned step, by the cost model, transfers included
  host            the most bytes that are in the host's memory at once
  moved           bytes that leave the device and come back in a step
  smallest        the smallest peak of a plan of this kind
  peak at         the node at which the peak is reached
  planned in      seconds of the command, reading and differentiating included

Then all widths of the model and its vocabulary are divided by `--shrink`, and a plan of the same kind, without a budget, runs on the CPU
with `--tokens` tokens. The peaks on the device and outside have to be the predicted ones.

Exit code 1 if a plan does not fit or a peak is not the predicted one.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.lib import llama, options, page
from tools.lib.compiler import Compiler, Refused

MODEL = llama.LLAMAS["Llama-3.1-8B"]
LORA = ("--lora", "r=16,alpha=32,targets=*proj*")
SGD = ("--optimizer", "sgd", "--fuse-optimizer")
STEP = ("--loss", "causal-lm", "--drop-output", "logits", "--offload", "cpu", "--dim", "batch=1")


@dataclass(frozen=True)
class Row:
    """What is trained on how many tokens, on which device."""

    what: str
    trained: tuple[str, ...]
    device: str
    tokens: int


ROWS = {
    "lora-24": Row("frozen base, adapters", LORA, "rtx4090", 1 << 18),
    "lora-80": Row("frozen base, adapters", LORA, "h100", 1 << 21),
    "lora-141": Row("frozen base, adapters", LORA, "h200", 1 << 22),
    "all-80": Row("all parameters, fused SGD", SGD, "h100", 1 << 20),
}


def usable_bytes(device: str) -> int:
    profile = json.loads((options.ROOT / f"passes/analysis/devices/{device}.json").read_text())
    return profile["memory_bytes"] - profile["reserved_bytes"]


def planned(compiler: Compiler, model: Path, row: Row, chunks: int) -> tuple[dict, float]:
    """Returns the report of a plan within the memory of the device, and the seconds of the command."""
    started = time.monotonic()
    report = compiler.call_json(
        "plan", model, *STEP, *row.trained, "--dim", f"seq={row.tokens}", "--tile-sequence", chunks, "--tile-loss", chunks,
        "--budget", "auto", "--device-profile", row.device,
    )  # fmt: skip
    return report, time.monotonic() - started


def line(row: Row, report: dict, seconds: float) -> str:
    def gigabytes(count: int) -> str:
        return f"{count / 1e9:,.1f} GB"

    cells = [
        row.what,
        gigabytes(usable_bytes(row.device)),
        f"{row.tokens:,}",
        gigabytes(report["peak_after_bytes"]),
        f"{report['cost_after'] / report['cost_before']:.2f}",
        gigabytes(report["outside_peak_bytes"]),
        gigabytes(report["transferred_bytes"]),
        gigabytes(report["smallest_feasible_bytes"]),
        f"`{report['peak_at']}`",
        f"{seconds:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def shrunk(factor: int) -> llama.Llama:
    """Returns the model with all widths divided. The width of a head is divided by 8, and the number of heads by the rest."""
    return dataclasses.replace(
        MODEL,
        hidden=MODEL.hidden // factor,
        intermediate=MODEL.intermediate // factor,
        heads=max(MODEL.heads * 8 // factor, 1),
        kv_heads=max(MODEL.kv_heads * 8 // factor, 1),
        head_dim=MODEL.head_dim // 8,
        vocabulary=MODEL.vocabulary // factor,
    )


def write_with_weights(model: llama.Llama, path: Path) -> None:
    """Writes a model with random weights."""
    llama.write(model, path)
    random = np.random.default_rng(0)
    numbers = random.normal(0, 0.05, model.parameters() + model.hidden).astype(np.float32)
    # The upper half of a float32 is a bfloat16.
    (numbers.view(np.uint32) >> 16).astype("<u2").tofile(path.parent / llama.WEIGHTS)


def ran(compiler: Compiler, model: Path, row: Row, chunks: int, tokens: int) -> tuple[str, bool]:
    """Runs a step of a row on a small model. Returns a line of a table, and whether both peaks are the predicted ones."""
    graph = model.with_name("step.onnx")
    compiler.call(
        model, "-o", graph, *STEP, *row.trained, "--dim", f"seq={tokens}", "--tile-sequence", chunks, "--tile-loss", chunks,
        "--policy", "chunks",
    )  # fmt: skip
    found = compiler.call_json("run", graph, "--seed", "1", "--threads", "1")
    pairs = [
        (found["predicted_peak_bytes"], found["measured_peak_bytes"]),
        (found["predicted_outside_bytes"], found["outside_peak_bytes"]),
    ]
    cells = [row.what, f"{tokens:,}", *(f"{number:,}" for pair in pairs for number in pair)]
    return f"| {' | '.join(cells)} |", all(a == b for a, b in pairs)


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--row", type=options.words_of(ROWS), default=list(ROWS), help=", ".join(ROWS))
    options.add_counts(parser, chunks=32, shrink=64, tokens=1024)
    options.add_page(parser)
    asked = parser.parse_args()
    compiler = Compiler(asked.ckpt_opt, timeout_s=3600)
    wrong = []
    lines = [
        "`python tools long_context --ckpt-opt BINARY --page docs/long-context.md` wrote this page; its `--help` explains the columns.",
        "",
        page.head(f"{MODEL.name}, one sequence in {asked.chunks} chunks", 2, page.load()),
        "",
        "| trained | memory | tokens | peak | time | host | moved | smallest | peak at | planned in |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|--:|",
    ]
    print("\n".join(lines), flush=True)

    def add(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    with options.folder_or_scratch(None) as folder:
        llama.write(MODEL, folder / "model.onnx")
        for name in asked.row:
            try:
                add(line(ROWS[name], *planned(compiler, folder / "model.onnx", ROWS[name], asked.chunks)))
            except Refused as refused:
                wrong.append(f"{name}: {refused}")
        (folder / "small").mkdir()
        small = folder / "small/model.onnx"
        write_with_weights(shrunk(asked.shrink), small)
        add("")
        add(f"Run on the CPU, with widths and vocabulary divided by {asked.shrink}:")
        add("")
        add("| trained | tokens | peak, predicted | measured | outside, predicted | measured |")
        add("|---|--:|--:|--:|--:|--:|")
        of_kind = {ROWS[name].trained: ROWS[name] for name in asked.row}
        for row in of_kind.values():
            text, is_right = ran(compiler, small, row, asked.chunks, asked.tokens)
            add(text)
            if not is_right:
                wrong.append(f"{row.what}: a peak is not the predicted one")
    notes = ["the first table is predicted, not run"]
    return page.finish("The longest sequences on one device", lines, notes, wrong, asked.page)
