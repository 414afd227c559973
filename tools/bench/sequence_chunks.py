"""Measures the peak and the time of a step whose sequence goes through the model in chunks of a fixed length, at growing lengths.

    python tools sequence_chunks --ckpt-opt BINARY [--model fixtures/llama32/model.onnx] [--tokens 2048,4096,8192,16384]
        [--chunk 512] [--room 2] [--page FILE.md] [--picture FILE.svg]

For each length the model is compiled with its sequence in chunks (`--tile-sequence`): by `--policy chunks`, within a multiple (`--room`)
of what that policy takes, and by that policy with `--offload cpu`. Peaks are measured, without parameters and inputs; each has to be the
predicted one. Columns:

  bytes, step     the peak by `--policy chunks`, and the time of a step over that of an unplanned step on the whole sequence, each the
                  median of three
  beyond          what the peak is above `--kv` bytes for each token: keys, values and their gradients, which all tokens keep, and
                  once more of one layer, whose attention reads and writes copies
  roomy, step     the same within the larger budget
  offloaded       the peak with `--offload cpu`
  outside         the most bytes outside the device's memory at once
  whole, bytes    the peak of the unplanned step
  full, bytes     the peak by `--policy full` on the whole sequence
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.lib import options, page
from tools.lib.chart import Axis, Curve, chart
from tools.lib.compiler import Compiler

LOSS = ("--loss", "causal-lm", "--drop-output", "logits", "--effort", "first")
STEPS = 3
LABELS = ("whole, unplanned", "whole, --policy full", "chunks", "chunks, offloaded")
COLORS = ("#555555", "#e08e0b", "#1f5fa8", "#2e8b57")


@dataclass(frozen=True)
class Step:
    """What a step took."""

    static_bytes: int
    """Parameters and inputs."""
    bytes: int
    """The peak above them."""
    outside_bytes: int
    time_us: float


def measured(compiler: Compiler, graph: Path, *how: str | Path | float) -> Step:
    """Compiles and runs a step.

    Raises:
        ValueError: the peak is not the predicted one.
    """
    compiler.call(*how, "-o", graph, *LOSS)
    ran = compiler.call_json("run", graph, "--seed", "1", "--steps", STEPS)
    if ran["measured_peak_bytes"] != ran["predicted_peak_bytes"]:
        raise ValueError(f"{ran['predicted_peak_bytes']} bytes predicted, {ran['measured_peak_bytes']} measured")
    static = ran["static_bytes"]
    return Step(static, ran["measured_peak_bytes"] - static, ran["outside_peak_bytes"], ran["step_time_us"])


def picture(peaks: dict[str, list[tuple[int, int]]]) -> str:
    """Draws the peaks over the number of tokens."""
    tokens = sorted({count for points in peaks.values() for count, _ in points})
    most = max(peak for points in peaks.values() for _, peak in points)
    marks = [1 << n for n in range(20, 40) if 1 << n <= 2 * most]
    return chart(
        [Curve(label, color, points) for (label, points), color in zip(peaks.items(), COLORS, strict=True)],
        Axis("tokens", [(count, f"{count:,}") for count in tokens], is_logarithmic=True),
        Axis("peak, MiB", [(mark, f"{mark >> 20:,}") for mark in marks], is_logarithmic=True),
    )


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--model", type=Path, default=Path("fixtures/llama32/model.onnx"))
    parser.add_argument("--tokens", type=options.words, default=["2048", "4096", "8192", "16384"])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--room", type=float, default=2)
    parser.add_argument("--kv", type=int, default=576, help="bytes of keys, values and gradients for each token")
    options.add_page(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the peaks")
    given = parser.parse_args()
    compiler = Compiler(given.ckpt_opt, timeout_s=1200)
    about = f"{given.model}, chunks of {given.chunk} tokens, batch 1"
    lines = [
        page.head(about, 2, page.load()),
        "",
        "| tokens | chunks | bytes | beyond | step | roomy, bytes | step | offloaded | outside | whole, bytes | full, bytes |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    peaks: dict[str, list[tuple[int, int]]] = {label: [] for label in LABELS}
    with options.folder_or_scratch(None) as folder:
        graph = folder / "step.onnx"
        for tokens in map(int, given.tokens):
            chunks = tokens // given.chunk
            model = (given.model, "--dim", "batch=1", "--dim", f"seq={tokens}")
            cut = (*model, "--tile-sequence", str(chunks))
            whole = measured(compiler, graph, *model, "--policy", "none")
            full = measured(compiler, graph, *model, "--policy", "full")
            least = measured(compiler, graph, *cut, "--policy", "chunks")
            outside = measured(compiler, graph, *cut, "--policy", "chunks", "--offload", "cpu")
            budget = whole.static_bytes + int(given.room * least.bytes)
            roomy = measured(compiler, graph, *cut, "--budget", str(budget))
            cells = [
                f"{tokens:,}",
                str(chunks),
                f"{least.bytes:,}",
                f"{least.bytes - given.kv * tokens:,}",
                f"{least.time_us / whole.time_us:.2f}",
                f"{roomy.bytes:,}",
                f"{roomy.time_us / whole.time_us:.2f}",
                f"{outside.bytes:,}",
                f"{outside.outside_bytes:,}",
                f"{whole.bytes:,}",
                f"{full.bytes:,}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            for label, step in zip(LABELS, (whole, full, least, outside), strict=True):
                peaks[label].append((tokens, step.bytes))
    if given.picture:
        given.picture.write_text(picture(peaks))
    notes = [
        f"`--policy chunks` keeps {given.kv} bytes for each token: keys, values and their gradients, and once more of one layer",
        f"the larger budget is {given.room:g} times what that policy takes",
    ]
    return page.finish("Sequences in chunks", lines, notes, [], given.page)
