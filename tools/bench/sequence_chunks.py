"""Measures the peak and the time of a step whose sequence goes through the model in chunks of a fixed length, at growing lengths.

    python tools sequence_chunks --ckpt-opt BINARY [--model fixtures/llama32/model.onnx] [--tokens 2048,4096,8192,16384]
        [--chunk 512] [--room 2] [--page FILE.md]

For each length the model is compiled with its sequence in chunks (`--tile-sequence`), once by `--policy chunks` and once within a
multiple (`--room`) of what that policy takes. Peaks are measured, without parameters and inputs; each has to be the predicted one.
Columns:

  bytes, step     the peak by `--policy chunks`, and the time of a step over that of an unplanned step on the whole sequence, each the
                  median of three
  beyond          what the peak is above `--kv` bytes for each token: keys, values and their gradients, which all tokens keep, and
                  once more of one layer, whose attention reads and writes copies
  roomy, step     the same within the larger budget
  whole, bytes    the peak of the unplanned step
  full, bytes     the peak by `--policy full` on the whole sequence
"""

from __future__ import annotations

from pathlib import Path

from tools.lib import options, page
from tools.lib.compiler import Compiler

LOSS = ("--loss", "causal-lm", "--drop-output", "logits", "--effort", "first")
STEPS = 3


def measured(compiler: Compiler, graph: Path, *how: str | Path | float) -> tuple[int, int, float]:
    """Compiles a step. Returns its static bytes, the peak above them, and its time in microseconds.

    Raises:
        ValueError: the peak is not the predicted one.
    """
    compiler.call(*how, "-o", graph, *LOSS)
    ran = compiler.call_json("run", graph, "--seed", "1", "--steps", STEPS)
    if ran["measured_peak_bytes"] != ran["predicted_peak_bytes"]:
        raise ValueError(f"{ran['predicted_peak_bytes']} bytes predicted, {ran['measured_peak_bytes']} measured")
    static = ran["static_bytes"]
    return static, ran["measured_peak_bytes"] - static, ran["step_time_us"]


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--model", type=Path, default=Path("fixtures/llama32/model.onnx"))
    parser.add_argument("--tokens", type=options.words, default=["2048", "4096", "8192", "16384"])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--room", type=float, default=2)
    parser.add_argument("--kv", type=int, default=576, help="bytes of keys, values and gradients for each token")
    options.add_page(parser)
    given = parser.parse_args()
    compiler = Compiler(given.ckpt_opt, timeout_s=1200)
    about = f"{given.model}, chunks of {given.chunk} tokens, batch 1"
    lines = [
        page.head(about, 2, page.load()),
        "",
        "| tokens | chunks | bytes | beyond | step | roomy, bytes | step | whole, bytes | full, bytes |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    with options.folder_or_scratch(None) as folder:
        graph = folder / "step.onnx"
        for tokens in map(int, given.tokens):
            chunks = tokens // given.chunk
            model = (given.model, "--dim", "batch=1", "--dim", f"seq={tokens}")
            cut = (*model, "--tile-sequence", str(chunks))
            static, whole, whole_us = measured(compiler, graph, *model, "--policy", "none")
            _, full, _ = measured(compiler, graph, *model, "--policy", "full")
            _, least, least_us = measured(compiler, graph, *cut, "--policy", "chunks")
            budget = static + int(given.room * least)
            _, roomy, roomy_us = measured(compiler, graph, *cut, "--budget", str(budget))
            cells = [
                f"{tokens:,}",
                str(chunks),
                f"{least:,}",
                f"{least - given.kv * tokens:,}",
                f"{least_us / whole_us:.2f}",
                f"{roomy:,}",
                f"{roomy_us / whole_us:.2f}",
                f"{whole:,}",
                f"{full:,}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    notes = [
        f"`--policy chunks` keeps {given.kv} bytes for each token: keys, values and their gradients, and once more of one layer",
        f"the larger budget is {given.room:g} times what that policy takes",
    ]
    return page.finish("Sequences in chunks", lines, notes, [], given.page)
