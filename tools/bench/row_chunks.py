"""Compares the time of steps with parts of the model in chunks of rows with that of the same steps without.

    python tools row_chunks --ckpt-opt BINARY [--model llama_small] [--batch 2] [--seq 512] [--chunks 4] [--policy full]
        [--rounds 7] [--steps 3] [--limit 1.03] [--page FILE.md]

An exported model with random weights is compiled, always with the same recomputation policy. In each round every variant runs
`--steps` steps, one variant after the other: whole, the MLPs in chunks (`--tile-mlp`), head and loss in chunks (`--tile-loss`), and both.
One thread computes, and its processor time counts. Printed are the peak with parameters and inputs, the median and the least time of
all steps of a variant, and two ratios to the whole step: the median over the rounds of the ratio in a round, which is judged, and
the ratio of the least times. Where they are far apart, the machine was busy.

Exit code 1 if a measured peak differs from the predicted one, or a ratio is above `--limit` (1.03). Needs
tools/requirements-torch.txt.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from tools.lib import models, options, page
from tools.lib.compiler import Compiler

WHOLE = "whole"


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--model", default="llama_small", choices=models.MODELS)
    parser.add_argument("--policy", default="full")
    parser.add_argument("--limit", type=float, default=1.03)
    options.add_counts(parser, batch=2, seq=512, chunks=4, rounds=7, steps=3)
    options.add_page(parser)
    given = parser.parse_args()
    compiler = Compiler(given.ckpt_opt)
    chunks = str(given.chunks)
    mlp, loss = ("--tile-mlp", chunks), ("--tile-loss", chunks)
    variants = {WHOLE: (), "MLPs": mlp, "head and loss": loss, "both": (*mlp, *loss)}
    about = f"{given.model}, {given.batch} x {given.seq} tokens, {given.chunks} chunks, --policy {given.policy}"
    lines = [
        page.head(about, 1, page.load()),
        "",
        "| in chunks | peak, MiB | step, ms: median | least | over the whole step: median | least |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    peaks: dict[str, int] = {}
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    wrong = []
    with options.folder_or_scratch(None) as folder:
        source = folder / "model.onnx"
        models.export(models.build(given.model, torch.float32), source)
        sizes = options.dim_options({"batch": given.batch, "seq": given.seq})
        asked = ("--loss", models.MODELS[given.model][2], "--drop-output", "*", "--policy", given.policy)
        for name, cut in variants.items():
            compiler.call(source, "-o", graph(folder, name), *asked, *sizes, *cut)
        for _ in range(given.rounds):
            for name, spent in times.items():
                counts = ("--steps", str(given.steps), "--threads", "1")
                ran = compiler.call_json("run", graph(folder, name), "--seed", "1", *counts)
                spent.append([step["cpu_us"] / 1e3 for step in ran["steps"]])
                peaks[name] = ran["measured_peak_bytes"]
                if ran["measured_peak_bytes"] != ran["predicted_peak_bytes"]:
                    wrong.append(f"{name}: {ran['predicted_peak_bytes']} bytes predicted, {peaks[name]} measured")
    middles = {name: [statistics.median(steps) for steps in spent] for name, spent in times.items()}
    least_whole = min(map(min, times[WHOLE]))
    for name, rounds in times.items():
        middle = statistics.median(a / b for a, b in zip(middles[name], middles[WHOLE], strict=True))
        every = [step for steps in rounds for step in steps]
        least = min(every) / least_whole
        if middle > given.limit:
            wrong.append(f"{name}: {middle:.3f} times the whole step")
        cells = f"{peaks[name] / 2**20:.1f} | {statistics.median(every):.0f} | {min(every):.0f}"
        lines.append(f"| {name} | {cells} | {middle:.3f} | {least:.3f} |")
    print(*lines, sep="\n")
    return page.finish("Rows in chunks", lines, [], list(dict.fromkeys(wrong)), given.page)


def graph(folder: Path, variant: str) -> Path:
    return folder / f"{variant.replace(' ', '-')}.onnx"
