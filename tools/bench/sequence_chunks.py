"""Measures the peak and the time of a step whose sequence goes through the model in chunks of a fixed length, at growing lengths.

    python tools sequence_chunks --ckpt-opt BINARY [--model fixtures/llama32/model.onnx] [--tokens 2048,4096,8192,16384]
        [--chunk 512] [--room 1.25] [--page FILE.md]

For each length the model is compiled with its sequence in chunks (`--tile-sequence`), within a multiple (`--room`) of the smallest
peak above parameters and inputs that the planner knows. Columns:

  bytes           the measured peak, parameters and inputs aside; it has to be the predicted one
  a token         how much of that was added since the row before, for each token added
  whole, bytes    the smallest peak that the planner knows for the whole sequence
  whole, a token  how much that grows for each token
  step            the time of a step over that of an unplanned step on the whole sequence, each the median of three

Keys, values and their gradients grow with the sequence; `--kv` is how many bytes of them a token has.
"""

from __future__ import annotations

from pathlib import Path

from tools.lib import options, page
from tools.lib.compiler import Compiler, Refused

LOSS = ("--loss", "causal-lm", "--drop-output", "logits", "--effort", "first")
STEPS = 3


def measured(compiler: Compiler, graph: Path, *how: str | Path | float) -> tuple[int, float]:
    """Compiles a step and returns its peak above static bytes and its time.

    Raises:
        ValueError: the peak is not the predicted one.
    """
    compiler.call(*how, "-o", graph, *LOSS)
    ran = compiler.call_json("run", graph, "--seed", "1", "--steps", STEPS)
    if ran["measured_peak_bytes"] != ran["predicted_peak_bytes"]:
        raise ValueError(f"{ran['predicted_peak_bytes']} bytes predicted, {ran['measured_peak_bytes']} measured")
    return ran["measured_peak_bytes"] - ran["static_bytes"], ran["step_time_us"]


def smallest(compiler: Compiler, *how: str | Path) -> int:
    """Returns the smallest peak that is known to be possible."""
    try:
        compiler.call_json("plan", *how, *LOSS, "--budget", "1KiB")
    except Refused as refused:
        if refused.smallest_budget is None:
            raise
        return int(refused.smallest_budget)
    return 1024


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--model", type=Path, default=Path("fixtures/llama32/model.onnx"))
    parser.add_argument("--tokens", type=options.words, default=["2048", "4096", "8192", "16384"])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--room", type=float, default=1.25)
    parser.add_argument("--kv", type=int, default=384, help="bytes of keys, values and their gradients, for each token")
    options.add_page(parser)
    given = parser.parse_args()
    compiler = Compiler(given.ckpt_opt, timeout_s=1200)
    about = f"{given.model}, chunks of {given.chunk} tokens, batch 1, {given.room} times the smallest known peak"
    lines = [
        page.head(about, 2, page.load()),
        "",
        "| tokens | chunks | bytes | a token | whole, bytes | whole, a token | step |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    before = (0, 0, 0)
    with options.folder_or_scratch(None) as folder:
        graph = folder / "step.onnx"
        for tokens in map(int, given.tokens):
            chunks = tokens // given.chunk
            model = (given.model, "--dim", "batch=1", "--dim", f"seq={tokens}")
            cut = (*model, "--tile-sequence", str(chunks))
            unplanned, unplanned_us = measured(compiler, graph, *model, "--policy", "none")
            static = compiler.call_json("plan", *model, *LOSS, "--policy", "none")
            static_bytes = static["peak_before_bytes"] - static["peak_above_static_before_bytes"]
            room = static_bytes + int((smallest(compiler, *cut) - static_bytes) * given.room)
            peak, us = measured(compiler, graph, *cut, "--budget", str(room))
            whole = smallest(compiler, *model) - static_bytes
            added = [(now - then) / (tokens - before[0]) for now, then in zip((peak, whole), before[1:], strict=True)]
            cells = [f"{peak:,}", f"{added[0]:,.0f}", f"{whole:,}", f"{added[1]:,.0f}", f"{us / unplanned_us:.2f}"]
            lines.append(f"| {tokens:,} | {chunks} | {' | '.join(cells)} |")
            print(lines[-1], f"unplanned: {unplanned:,}", flush=True)
            before = (tokens, peak, whole)
    notes = [f"keys, values and their gradients take {given.kv} bytes for each token"]
    return page.finish("Sequences in chunks", lines, notes, [], given.page)
