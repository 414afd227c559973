"""Runs training steps in which all memory options are combined, and checks memory, bits and gradients.

    python tools all_options --ckpt-opt BINARY [--models llama_small] [--dtypes f32,bf16] [--shape 2x512]
        [--budgets 80%,60%,floor] [--effort first] [--threads 2] [--no-check] [--folder DIR] [--page FILE.md]
        [-- OPTIONS, instead of --tile-loss auto --tile-mlp auto --offload auto --optimizer adamw --fuse-optimizer]

Each model is built from its configuration with random weights (no network) and exported. `llama_small` is Llama-3.2-1B with
a smaller width, vocabulary and number of layers. The step is planned within each budget. A budget is written as the binary
takes it, as `floor` for the smallest feasible one, or as `+SIZE` above parameters, inputs and state. If a plan offloads,
a second plan may offload half of those bytes (`--host-budget`). Beside each planned step runs one with the same chunks
that recomputes and offloads nothing, on the same tokens and state.

Exit code 1 if
  peak        a measured peak differs from the predicted one, or exceeds the budget
  outside     more bytes are offloaded than predicted, or than the host budget allows
  bits        an output (updated parameters and state, or gradients) differs in any bit from that of the step that
              recomputes and offloads nothing, with transfers overlapped or in sequence
  gradients   of the chunked or the whole step exceed the tolerance of tolerance.py, against PyTorch (float32) or float64
              (bfloat16, root mean square of each tensor); left out with --no-check
  refused     a budget is refused, other than one with half of the host bytes

GPT-2 small at 4 x 512 tokens within 0.9 GB above parameters and inputs. Without tiling, no schedule fits into 1.23 GB:

    python tools all_options --ckpt-opt BINARY --models gpt2 --shape 4x512 --dtypes f32 --budgets +900MB -- \\
        --tile-loss auto

Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import platform
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from tools.lib import options, page
from tools.lib.compiler import Compiler, Refused, read_tensors, sha256_of, write_tensors
from tools.lib.models import (
    DTYPES,
    MODELS,
    build,
    eager_step,
    export,
    gradients_by_name,
    judge_gradients,
    random_tokens,
)

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
    """The number of chunks of each region, by the node that begins it."""

    loss: dict[str, int]
    mlps: dict[str, int]

    @staticmethod
    def of(report: dict) -> Tiles:
        return Tiles(report["tiled"], report["tiled_mlps"])

    def options(self) -> list[str]:
        each = (max(found.values(), default=1) for found in (self.loss, self.mlps))
        return [word for name, n in zip(TILES, each, strict=True) if n > 1 for word in (name, str(n))]


def without(options: list[str], *names: str) -> list[str]:
    """Returns the options without some that take a value."""
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
    """One model in one type: its file, its tokens, and its runs so far."""

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
        return sha256_of(outputs), report

    def plain(self, tiles: Tiles) -> tuple[str, dict]:
        """Returns digest and report of the step with the same chunks that recomputes and offloads nothing."""
        words = [*without(self.bench.choices, *TILES, *PLANNING), *tiles.options()]
        key = " ".join(words)
        if key not in self.unplanned:
            graph = self.bench.folder / "plain.onnx"
            report = self.compiled(graph, "--policy", "none", *words)
            if Tiles.of(report) != tiles:
                self.wrong(f"bits: asked for {tiles}, the step without a plan is in {Tiles.of(report)}")
            self.unplanned[key] = self.digest(graph)
            graph.unlink()
            run = self.unplanned[key][1]
            if run["measured_peak_bytes"] != run["predicted_peak_bytes"]:
                self.wrong(
                    f"peak: without a plan {run['measured_peak_bytes']} B, predicted {run['predicted_peak_bytes']}"
                )
        return self.unplanned[key]

    def planned(self, budget: str, host_bytes: int | None = None) -> int:
        """Plans and runs a step, and returns the bytes that were offloaded at once."""
        bench, graph = self.bench, self.bench.folder / "planned.onnx"
        room = [] if host_bytes is None else ["--host-budget", str(host_bytes)]
        report = self.compiled(graph, "--budget", budget, "--effort", bench.effort, *bench.choices, *room)
        tiles = Tiles.of(report)
        label = f"{budget}, {bench.told(tiles)}" + ("" if host_bytes is None else f", {host_bytes} B outside")
        want, plain = self.plain(tiles)
        for streams in ("on", "off") if report["offloaded"] else ("on",):
            digest, run = self.digest(graph, "--async-transfers", streams)
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
        mib = [
            x / 2**20
            for x in (report["static_bytes"], report["peak_after_bytes"], peak, plain["measured_peak_bytes"], outside)
        ]
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
        """Compares the gradients of a step with that many chunks with PyTorch's."""
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
        label = f"gradients: {self.bench.told(tiles)}"
        worst, largest = judge_gradients(table, found, self.model, self.bench.theirs, self.bench.exact)
        if largest is not None:
            self.bench.notes.append(f"{self.label}: {label}, by their largest error: {largest}")
        self.bench.notes.append(f"{self.label}: {label}: {worst}")
        if not worst.agrees:
            self.wrong(f"{label}: {worst}")

    def floor(self) -> str:
        """Returns the smallest budget that the binary reports."""
        try:
            self.compiled(
                self.bench.folder / "none.onnx", "--budget", "1", "--effort", self.bench.effort, *self.bench.choices
            )
        except Refused as refused:
            if refused.smallest_budget is not None:
                return refused.smallest_budget
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
        return options.dim_options({"batch": self.batch, "seq": self.seq})

    @staticmethod
    def told(tiles: Tiles) -> str:
        return " ".join(tiles.options()) or "in one piece"

    def case(self, name: str, dtype: str, budgets: list[str]) -> list[str]:
        model, source = build(name, DTYPES[dtype]), self.folder / f"{name}-{dtype}.onnx"
        if not source.exists():
            export(model, source)
        tokens = random_tokens(model, self.batch, self.seq)
        feed = self.folder / f"feed-{name}-{dtype}.safetensors"
        case = Case(self, f"{name} {self.batch}x{self.seq} {dtype}", name, model, source, feed)
        if self.check:
            self.theirs, self.exact = gradients_by_name(model, eager_step(model, tokens)()), None
            if dtype != "f32":
                wide = build(name, DTYPES[dtype]).double()
                self.exact = gradients_by_name(wide, eager_step(wide, tokens)())
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
        """Parses a size as the binary does."""
        units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
        if found is None or found[2] not in units:
            raise Refused(f"`{text}` is no size")
        return int(float(found[1]) * units[found[2]])

    def state(self, graph: Path) -> dict[str, np.ndarray]:
        """Returns optimizer state as after some steps: squares are not negative."""
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
    words, choices = options.split_at_dashes()
    choices = list(CHOICES) if choices is None else choices
    parser = options.with_binary(__doc__)
    parser.add_argument("--models", type=options.words_of(MODELS), default=["llama_small"])
    parser.add_argument("--dtypes", type=options.words_of(DTYPES), default=list(DTYPES))
    parser.add_argument("--shape", default="2x512")
    parser.add_argument("--budgets", default=f"80%,60%,{FLOOR}")
    parser.add_argument("--effort", default="first")
    options.add_counts(parser, threads=2)
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave PyTorch's gradients out")
    parser.add_argument("--folder", type=Path, help="keep exports here, and take them from here")
    options.add_page(parser)
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    batch, seq = map(int, args.shape.split("x"))
    lines = [
        page.head(platform.machine(), args.threads, f"--effort {args.effort}", " ".join(choices)), "", HEAD,
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        compiler = Compiler(args.ckpt_opt, 7200.0)
        bench = Bench(compiler, folder, batch, seq, args.threads, args.effort, args.check, choices)
        bench.outside.mkdir(parents=True, exist_ok=True)
        for model in args.models:
            for dtype in args.dtypes:
                lines += bench.case(model, dtype, args.budgets.split(","))
        if any(bench.outside.iterdir()):
            bench.wrong.append("outside: something is left of what waited")
    return page.finish("All choices in one plan", lines, bench.notes, bench.wrong, args.page)
