#!/usr/bin/env python3
"""Every choice in one plan, run for real: loss and MLPs in parts, recomputation, offload, updates among the gradients.

    python tools/all_choices.py --ckpt-opt BINARY [--models llama_small] [--dtypes f32,bf16] [--shape 2x512]
        [--budgets 80%,60%,floor] [--effort first] [--threads 2] [--no-check] [--folder DIR] [--page FILE.md]
        [-- choices, instead of --tile-loss auto --tile-mlp auto --offload auto --optimizer adamw --fuse-optimizer]

Builds each model from its configuration with random weights (no network), `llama_small` being Llama-3.2-1B scaled down
in width, layers and words, exports it and plans its training step within each budget: as the binary takes it, `floor` for
the smallest that can be, or `+SIZE` for so much above parameters, inputs and state. Where a plan moves results, another is
made that may move half of their bytes (`--host-budget`). Beside each planned step runs one with the same parts in
which nothing is recomputed or moved, on the same tokens and state.

Exit 1 if
  peak        a measured peak is not the predicted one, or above the budget
  outside     more waits outside than was predicted, or than the host budget allows
  bits        an output (updated parameters and state, or gradients) differs in any bit from that of the step that
              recomputes and moves nothing, with transfers beside other nodes or one after the other
  gradients   of the step in so many parts, or of the one in one piece, are further from PyTorch's (float32) or from float64
              (bfloat16, root mean square of each tensor) than tolerance.py allows; left out with --no-check
  refused     a budget other than half a host's is refused

GPT-2 small in 4 x 512 tokens within 0.9 GB above parameters and inputs, where no schedule of whole scores fits into 1.23:

    python tools/all_choices.py --ckpt-opt BINARY --models gpt2 --shape 4x512 --dtypes f32 --budgets +900MB -- \\
        --tile-loss auto

Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import matching
import ml_dtypes
import numpy as np
import page
import tolerance
import torch
from compiler import Compiler, Refused, read_tensors, write_tensors
from options import listed
from reference import Reference
from step_time import DTYPES, MODELS, arrays, built, eager_step, export, tied

CHOICES = ("--tile-loss", "auto", "--tile-mlp", "auto", "--offload", "auto", "--optimizer", "adamw", "--fuse-optimizer")
PLANNING = ("--offload", "--host-budget", "--min-offload-bytes")
"""Choices with a value that say nothing of a step that is not planned."""
TILES = ("--tile-loss", "--tile-mlp")
KINDS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i64": np.int64}
FLOOR = "floor"

HEAD = """| model | budget | loss in | MLPs in | ops moved | overhead % | bound % | static MiB | peak MiB by the plan | peak MiB | without a plan MiB | outside MiB | host budget MiB | s |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Tiles:
    """Into how many parts each region is cut, by the node that begins it."""

    loss: dict[str, int]
    mlps: dict[str, int]

    @staticmethod
    def of(report: dict) -> Tiles:
        return Tiles(report["tiled"], report["tiled_mlps"])

    def options(self) -> list[str]:
        each = (max(found.values(), default=1) for found in (self.loss, self.mlps))
        return [word for name, n in zip(TILES, each, strict=True) if n > 1 for word in (name, str(n))]


def without(options: list[str], *names: str) -> list[str]:
    """The options less some that have a value."""
    kept = []
    words = iter(options)
    for word in words:
        if word in names:
            next(words)
        else:
            kept.append(word)
    return kept


@dataclass
class Case:
    """One model in one type: its file, tokens, and what has been run of it."""

    bench: Bench
    label: str
    name: str
    model: torch.nn.Module
    source: Path
    feed: Path
    rows: list[str] = field(default_factory=list)
    unplanned: dict[str, tuple[str, dict]] = field(default_factory=dict)
    """Digest of the outputs and report, by the options of the step."""
    checked: set[str] = field(default_factory=set)

    def wrong(self, what: str) -> None:
        self.bench.wrong.append(f"{self.label}: {what}")

    def compiled(self, out: Path, *options: str) -> dict:
        bench = self.bench
        return bench.compiler.call_json(
            self.source, "-o", out, "--loss", MODELS[self.name][2], *bench.sizes, "--drop-output", "logits", *options
        )

    def run(self, graph: Path, outputs: Path, *more: str) -> dict:
        bench = self.bench
        return bench.compiler.call_json("run", graph, "--inputs", self.feed, "--outputs", outputs, "--threads",
                                        str(bench.threads), "--offload-dir", bench.outside, *more)  # fmt: skip

    def digest(self, graph: Path, *more: str) -> tuple[str, dict]:
        outputs = graph.with_suffix(".safetensors")
        report = self.run(graph, outputs, *more)
        with outputs.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        outputs.unlink()
        return digest, report

    def plain(self, tiles: Tiles) -> tuple[str, dict]:
        """The step in the same parts that recomputes and moves nothing."""
        options = [*without(self.bench.choices, *TILES, *PLANNING), *tiles.options()]
        key = " ".join(options)
        if key not in self.unplanned:
            graph = self.bench.folder / "plain.onnx"
            report = self.compiled(graph, "--policy", "none", *options)
            if Tiles.of(report) != tiles:
                self.wrong(f"bits: asked for {tiles}, the step without a plan is in {Tiles.of(report)}")
            self.unplanned[key] = self.digest(graph)
            graph.unlink()
            run = self.unplanned[key][1]
            if run["measured_peak_bytes"] != run["predicted_peak_bytes"]:
                self.wrong(f"peak: without a plan {run['measured_peak_bytes']} B, predicted {run['predicted_peak_bytes']}")
        return self.unplanned[key]

    def planned(self, budget: str, host_bytes: int | None = None) -> int:
        """Plans and runs a step; the bytes that waited outside."""
        bench, graph = self.bench, self.bench.folder / "planned.onnx"
        room = [] if host_bytes is None else ["--host-budget", str(host_bytes)]
        report = self.compiled(graph, "--budget", budget, "--effort", bench.effort, *bench.choices, *room)
        tiles = Tiles.of(report)
        label = f"{budget}, {bench.told(tiles)}" + ("" if host_bytes is None else f", {host_bytes} B outside")
        want, plain = self.plain(tiles)
        for streams in ("on", "off") if report["offloaded"] else ("on",):
            digest, run = self.digest(graph, "--offload-streams", streams)
            peak, outside = run["measured_peak_bytes"], run["outside_peak_bytes"]
            if not peak == run["predicted_peak_bytes"] == report["peak_after_bytes"] <= report["budget_bytes"]:
                self.wrong(
                    f"peak: {label}: {peak} B measured, {run['predicted_peak_bytes']} predicted for the file, "
                    f"{report['peak_after_bytes']} planned, a budget of {report['budget_bytes']}"
                )
            if outside > run["predicted_outside_bytes"] or (host_bytes is not None and outside > host_bytes):
                self.wrong(f"outside: {label}: {outside} B, predicted {run['predicted_outside_bytes']}")
            if digest != want:
                self.wrong(f"bits: {label}, streams {streams}: outputs are not those of the step without a plan")
        graph.unlink()
        mib = [x / 2**20 for x in (report["static_bytes"], report["peak_after_bytes"], peak, plain["measured_peak_bytes"], outside)]
        self.rows.append(
            f"| {self.label} | {budget} | {max(tiles.loss.values(), default=1)} | {max(tiles.mlps.values(), default=1)} "
            f"| {report['offloaded']} | {report['overhead_pct']:.2f} | {report['lower_bound_pct']:.2f} | "
            + " | ".join(f"{x:.1f}" for x in mib)
            + f" | {'' if host_bytes is None else f'{host_bytes / 2**20:.1f}'} | {run['step_time_us'] / 1e6:.2f} |"
        )
        print(self.rows[-1], flush=True)
        if bench.check:
            self.check(Tiles({}, {}))
            self.check(tiles)
        return outside

    def check(self, tiles: Tiles) -> None:
        """Gradients of a step in so many parts against PyTorch's."""
        key = " ".join(tiles.options())
        if key in self.checked:
            return
        self.checked.add(key)
        graph = self.bench.folder / "gradients.onnx"
        self.compiled(graph, "--policy", "none", *tiles.options())
        outputs = graph.with_suffix(".safetensors")
        self.run(graph, outputs)
        found = read_tensors(outputs)
        outputs.unlink()
        table = self.bench.compiler.inspect(graph)["parameters"]
        same = matching.match(table, Reference(self.bench.theirs, tied(self.model)), None)
        ours, theirs = same.gradients(found, self.bench.theirs)
        label = f"gradients: {self.bench.told(tiles)}"
        if self.bench.exact is None:
            worst = tolerance.compare(ours, theirs, tolerance.largest(theirs))
        else:
            exact = same.gradients(found, self.bench.exact)[1]
            worst = tolerance.compare_half(ours, theirs, exact, tolerance.root_mean_square)
            top = tolerance.compare_half(ours, theirs, exact)
            self.bench.notes.append(f"{self.label}: {label}, by their largest error: {top}")
        self.bench.notes.append(f"{self.label}: {label}: {worst}")
        if not worst.agrees:
            self.wrong(f"{label}: {worst}")

    def floor(self) -> str:
        """The smallest budget that the binary knows of."""
        try:
            self.compiled(self.bench.folder / "none.onnx", "--budget", "1", "--effort", self.bench.effort, *self.bench.choices)
        except Refused as refused:
            smallest = re.search(r"; (\d+) is the smallest", str(refused))
            if smallest:
                return smallest[1]
            raise
        raise Refused("a budget of one byte was kept")


@dataclass
class Bench:
    compiler: Compiler
    folder: Path
    batch: int
    seq: int
    threads: int
    effort: str
    check: bool
    choices: list[str]
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    theirs: dict[str, np.ndarray] = field(default_factory=dict)
    exact: dict[str, np.ndarray] | None = None

    @property
    def outside(self) -> Path:
        return self.folder / "outside"

    @property
    def sizes(self) -> list[str]:
        return ["--dim", f"batch={self.batch}", "--dim", f"seq={self.seq}"]

    @staticmethod
    def told(tiles: Tiles) -> str:
        return " ".join(tiles.options()) or "in one piece"

    def case(self, name: str, dtype: str, budgets: list[str]) -> list[str]:
        model, source = built(name, DTYPES[dtype]), self.folder / f"{name}-{dtype}.onnx"
        if not source.exists():
            export(model, source)
        torch.manual_seed(self.batch * self.seq)
        tokens = torch.randint(3, model.config.vocab_size, (self.batch, self.seq))
        feed = self.folder / f"feed-{name}-{dtype}.safetensors"
        case = Case(self, f"{name} {self.batch}x{self.seq} {dtype}", name, model, source, feed)
        if self.check:
            self.theirs, self.exact = arrays(model, eager_step(model, tokens)()), None
            if dtype != "f32":
                wide = built(name, DTYPES[dtype]).double()
                self.exact = arrays(wide, eager_step(wide, tokens)())
        graph = self.folder / "plain.onnx"
        case.compiled(graph, "--policy", "none", *without(self.choices, *TILES, *PLANNING))
        write_tensors(feed, {"input_ids": tokens.numpy(), "labels": tokens.numpy(), **self.state(graph)})
        static = int(case.run(graph, graph.with_suffix(".safetensors"))["static_bytes"])
        for budget in budgets:
            try:
                if budget.startswith("+"):
                    above = self.size_bytes(budget[1:])
                    limit = str(static + above)
                else:
                    limit = case.floor() if budget == FLOOR else budget
                outside = case.planned(limit)
            except Refused as refused:
                case.wrong(f"refused: {budget}: {refused}")
                continue
            if outside:
                try:
                    case.planned(limit, outside // 2)
                except Refused as refused:
                    self.notes.append(f"{case.label}: {limit} with half of what was outside: {refused}")
        feed.unlink()
        return case.rows

    @staticmethod
    def size_bytes(text: str) -> int:
        """A size as the binary takes it."""
        units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
        if found is None or found[2] not in units:
            raise Refused(f"`{text}` is no size")
        return int(float(found[1]) * units[found[2]])

    def state(self, graph: Path) -> dict[str, np.ndarray]:
        """State of the optimizer as it may be after some steps: squares are not negative."""
        random, found = np.random.default_rng(5), {}
        for entry in self.compiler.inspect(graph)["inputs"]:
            name, shape = entry["name"], entry["shape"]
            if name in ("input_ids", "labels"):
                continue
            if name in ("lr", "step"):
                found[name] = np.asarray({"lr": 1e-3, "step": 7}[name], KINDS[entry["dtype"]])
                continue
            found[name] = (1e-3 * np.abs(random.standard_normal(shape, np.float32))).astype(KINDS[entry["dtype"]])
        return found


def main() -> int:
    words = sys.argv[1:]
    choices = list(CHOICES)
    if "--" in words:
        at = words.index("--")
        words, choices = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--models", type=listed(MODELS), default=["llama_small"])
    parser.add_argument("--dtypes", type=listed(DTYPES), default=list(DTYPES))
    parser.add_argument("--shape", default="2x512")
    parser.add_argument("--budgets", default=f"80%,60%,{FLOOR}")
    parser.add_argument("--effort", default="first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave PyTorch's gradients out")
    parser.add_argument("--folder", type=Path, help="keep exports here, and take them from here")
    parser.add_argument("--page", type=Path, help="write the table as Markdown")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    batch, seq = map(int, args.shape.split("x"))
    lines = [
        page.head(platform.machine(), args.threads, f"--effort {args.effort}", " ".join(choices)), "", HEAD,
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        compiler = Compiler(args.ckpt_opt.resolve(), 7200.0)
        bench = Bench(compiler, folder, batch, seq, args.threads, args.effort, args.check, choices)
        bench.outside.mkdir(parents=True, exist_ok=True)
        for model in args.models:
            for dtype in args.dtypes:
                lines += bench.case(model, dtype, args.budgets.split(","))
        if any(bench.outside.iterdir()):
            bench.wrong.append("outside: something is left of what waited")
    return page.finish("All choices in one plan", lines, bench.notes, bench.wrong, args.page)


if __name__ == "__main__":
    sys.exit(main())
