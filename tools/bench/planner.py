"""Compares plans with those of other planners, known optima and the proven bound, and measures planning time.

    python tools planner table --ckpt-opt BINARY --graphs DIR --peers FILE [--reached FILE] [--public DIR]
        [--graph gpt2,…] [--points 12] [--no-cost] [--page FILE.md]
    python tools planner curve --ckpt-opt BINARY [--layers 8,64,…] [--ops 1000000,…] [--torch-layers 4,16,…]
        [--page FILE.md]

`table` reads cost graphs (`DIR/<name>.json.gz`), results of other planners on them (`{name: {rows: [{planner, solver,
budget, peak_above_static, flops_overhead_pct, bytes_overhead_pct, plan_cpu_s}]}}`) and earlier results (`{name: [{budget,
flops_overhead_pct}]}`, each of a schedule within that budget). Each row passes or fails:

  peer       at that planner's peak, our overhead in FLOPs is no higher; it is lower where the proven bound is lower
  reached    at that budget, our overhead in FLOPs is no higher
  inverse    at that planner's overhead, our peak is no higher, over budgets from the smallest to the unplanned peak
  monotone   a larger budget never costs more, at budgets 1 % apart, each planned by its own process
  smallest   our smallest feasible peak is no higher than that of any other planner
  optimum    on public graphs, the overhead in cost at a share of the unplanned peak is no higher than the best known

Peaks of other planners are raised by 4 bytes, because their traces leave one scalar out. `judge` below evaluates every
schedule again, independently of the binary. Times are CPU seconds of whole processes, including reading the graph.

`curve` plans generated training steps of transformers of growing size and fits `a * N log N`. With PyTorch 2.11 installed,
it also measures PyTorch's partitioner on transformers with `--torch-layers` layers. Exit code 0 if no row fails, else 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tools.lib import options
from tools.lib.compiler import Compiler, Refused, children_cpu_s

SCALAR_BYTES = 4
ROUNDING_PCT = 6e-5
"""Figures of other planners are rounded to four decimals."""

OPTIMA = {
    "vgg16": [(0.9, 1.97)],
    "vgg_unet": [(0.8, 1.99), (0.5, 6.97)],
    "mobilenet": [(0.8, 0.38), (0.5, 1.64)],
    "resnet50": [(0.8, 0.28), (0.5, 1.50)],
    "segnet": [(0.5, 40.7)],
    "random_layered_n100": [(0.8, 2.30)],
    "random_layered_n250": [(0.8, 4.26)],
    "random_layered_n500": [(0.8, 3.44)],
    "random_layered_n1000": [(0.8, 2.63)],
}
"""Cost overhead in percent at a share of the unplanned peak, by the beginning of a public graph's name."""
SMALL_OPTIMA = {
    "tiny_gpt2_1": [(204.6e6, 0.0), (198.3e6, 0.0), (179.4e6, 2.05), (160.0e6, 8.22)],
    "tiny_llama2": [(249.6e6, 2.96), (226.6e6, 6.21)],
}
"""FLOP overhead in percent at a peak, both rounded."""
SMALL_ROUNDING = (5e4, 5e-3)
FIRST_CPU_S, PLAN_CPU_S = 0.2, 3.0


class Failed(Exception):
    """A plan does not hold what its report says."""


def call(binary: Path, *arguments: object) -> tuple[dict, float]:
    """Returns the object that a command prints, and the CPU seconds that it took."""
    before = children_cpu_s()
    answer = Compiler(binary, timeout_s=7200.0).call_json(*map(str, arguments))
    return answer, children_cpu_s() - before


def load(path: Path) -> dict:
    with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
        return json.load(file)


def judge(graph: dict, schedule: list[int]) -> tuple[int, dict[str, float]]:
    """Peak above static in bytes and the sums of cost, flops and bytes of a schedule.

    An instance of a value lives from the step that computes it (a placeholder: from the start) to the last step that
    reads it before it is recomputed; outputs live to the end.
    """
    values, ops = graph["values"], graph["ops"]
    end = len(schedule)
    change = [0] * (end + 2)
    born: dict[int, int] = {j: 0 for j, v in enumerate(values) if v["kind"] == "ph"}
    last: dict[int, int] = {}
    total = {"cost": 0.0, "flops": 0.0, "bytes": 0.0}

    def close(value: int) -> None:
        if value in born and value in last:
            change[born[value]] += values[value]["bytes"]
            change[last[value] + 1] -= values[value]["bytes"]
        born.pop(value, None)
        last.pop(value, None)

    for step, index in enumerate(schedule):
        op = ops[index]
        for value in op["ins"]:
            if values[value]["kind"] != "static":
                if value not in born:
                    raise Failed(f"step {step} reads value {value}, which is not there")
                last[value] = step
        for value in op["outs"]:
            close(value)
            born[value] = last[value] = step
        for key in total:
            total[key] += op.get(key, 0)
    for value in graph["outputs"]:
        if values[value]["kind"] != "static":
            if value not in born:
                raise Failed(f"output {value} is never computed")
            last[value] = end
    for value in list(born):
        close(value)
    live = peak = 0
    for delta in change[: end + 1]:
        live += delta
        peak = max(peak, live)
    return peak, total


@dataclass
class Row:
    graph: str
    check: str
    what: str
    theirs: str
    ours: str
    bound: str = ""
    gap: str = ""
    traffic: str = ""
    cost: str = ""
    cpu: str = ""
    good: bool | None = None


COLUMNS = ("graph", "check", "what", "theirs", "ours", "bound", "gap", "traffic", "cost", "cpu", "good")
HEADS = ("graph", "check", "at", "theirs", "ours", "bound", "gap", "traffic", "cost", "CPU s", "verdict")
VERDICT = {True: "pass", False: "FAIL", None: ""}


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        words = [str(getattr(row, c)) for c in COLUMNS[:-1]] + [VERDICT[row.good]]
        print("  ".join(w for w in words if w), file=sys.stderr, flush=True)

    def markdown(self) -> str:
        lines = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        for row in self.rows:
            cells = [str(getattr(row, c)) for c in COLUMNS[:-1]] + [VERDICT[row.good]]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"


def percent(x: float | None) -> str:
    return "" if x is None or math.isinf(x) else f"{x:.4f} %"


def size(count: float) -> str:
    return f"{count / 1e9:.4f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


@dataclass
class Planner:
    """One graph: the binary plans it, `judge` evaluates the plan."""

    binary: Path
    path: Path
    folder: Path

    def __post_init__(self) -> None:
        self.graph = load(self.path)
        self.peak, self.total = judge(self.graph, list(range(len(self.graph["ops"]))))

    def plan(self, budget: int, objective: str, effort: str = "normal") -> tuple[dict, float]:
        """Returns the report of a plan with at most that peak above static bytes; checks it with `judge`."""
        out = self.folder / "schedule.json"
        words = ("--objective", objective, "--effort", effort, "--plan-out", out)
        report, took = call(self.binary, "plan", self.path, "--budget", budget, *words)
        peak, total = judge(self.graph, load(out)["schedule"])
        if peak > budget:
            raise Failed(f"the plan takes {peak} bytes, over its budget of {budget}")
        if peak != report["peak_above_static_after_bytes"]:
            raise Failed(f"the report says {report['peak_above_static_after_bytes']} bytes, the judge {peak}")
        for key, name in (("cost", "cost"), ("flops", "flops"), ("bytes", "traffic")):
            before = self.total[key]
            extra = 100 * (total[key] / before - 1) if before else 0.0
            if abs(extra - report[f"{name}_overhead_pct"]) > 1e-6 * max(1.0, abs(extra)):
                raise Failed(f"the report says {report[f'{name}_overhead_pct']} % of {name}, the judge {extra}")
        return report, took


def compared(
    table: Table, planner: Planner, check: str, what: str, budget: int, theirs: float, objective: str, strict: bool,
    slack_pct: float, at_most_cpu_s: float = math.inf, effort: str = "normal",
) -> None:  # fmt: skip
    """Adds a row: our overhead by `objective` at a budget, beside that of another planner."""
    name = planner.path.name.split(".json")[0]
    row = Row(name, check, what, percent(theirs), "")
    try:
        report, took = planner.plan(budget, objective, effort)
        ours, bound = report["overhead_pct"], report["lower_bound_pct"]
        row.ours, row.bound, row.gap = percent(ours), percent(bound), percent(report["gap_pct"])
        row.traffic, row.cost = percent(report["traffic_overhead_pct"]), percent(report["cost_overhead_pct"])
        row.cpu = f"{took:.2f}"
        row.good = ours <= theirs + slack_pct and took <= at_most_cpu_s
        if strict and bound < theirs - slack_pct:
            row.good = row.good and ours < theirs - slack_pct
    except (Failed, Refused) as failed:
        row.ours, row.good = str(failed), False
    table.add(row)


def by_cost(table: Table, planner: Planner, what: str, budget: int) -> None:
    """Adds a row for the same budget with the default objective; other planners have no such figure."""
    name = planner.path.name.split(".json")[0]
    try:
        report, took = planner.plan(budget, "cost")
    except (Failed, Refused) as failed:
        table.add(Row(name, "by cost", what, "", str(failed), good=False))
        return
    table.add(
        Row(
            name, "by cost", what, "", percent(report["flops_overhead_pct"]), percent(report["lower_bound_pct"]),
            percent(report["gap_pct"]), percent(report["traffic_overhead_pct"]), percent(report["cost_overhead_pct"]),
            f"{took:.2f}",
        )
    )  # fmt: skip


def peer_name(row: dict) -> str:
    words = [row["planner"], row.get("solver"), row.get("budget")]
    return " ".join(str(w) for w in words if w is not None)


def peers(table: Table, planner: Planner, rows: list[dict], costs: bool) -> None:
    for row in rows:
        budget = row["peak_above_static"] + SCALAR_BYTES
        what = f"{peer_name(row)} {size(budget)}"
        compared(table, planner, "peer", what, budget, row["flops_overhead_pct"], "flops", True, ROUNDING_PCT)
        table.rows[-1].what += f" (bytes {row['bytes_overhead_pct']} %, CPU {row.get('plan_cpu_s') or 0:.2f} s)"
        if costs:
            by_cost(table, planner, what, budget)


def inverse(table: Table, planner: Planner, rows: list[dict], points: int) -> None:
    """Adds rows with our smallest peak at each planner's overhead, from a curve with budgets at and between their
    peaks.
    """
    name = planner.path.name.split(".json")[0]
    curve, _ = call(planner.binary, "frontier", planner.path, "--objective", "flops", "--points", 2)
    low, high = curve["smallest_feasible_bytes"], curve["unplanned_bytes"]
    budgets = {low + (high - low) * i // (points - 1) for i in range(points)}
    budgets |= {max(low, row["peak_above_static"] + SCALAR_BYTES) for row in rows}
    listed = ",".join(str(b) for b in sorted(budgets))
    curve, took = call(planner.binary, "frontier", planner.path, "--objective", "flops", "--budgets", listed)
    for row in rows:
        theirs = row["peak_above_static"] + SCALAR_BYTES
        most = row["flops_overhead_pct"] + ROUNDING_PCT
        fits = [p["peak_bytes"] for p in curve["points"] if p["overhead_pct"] is not None and p["overhead_pct"] <= most]
        ours = min(fits, default=None)
        table.add(
            Row(
                name, "inverse", f"{peer_name(row)} {percent(row['flops_overhead_pct'])}", size(theirs),
                "none" if ours is None else size(ours), good=ours is not None and ours <= theirs,
            )
        )  # fmt: skip
    least = min((row["peak_above_static"] + SCALAR_BYTES for row in rows), default=math.inf)
    table.add(
        Row(
            name,
            "smallest",
            f"floor {size(curve['floor_bytes'])}",
            size(least),
            size(low),
            cpu=f"{took:.2f}",
            good=low <= least,
        )
    )


def monotone(table: Table, planner: Planner, points: int) -> None:
    """Plans at budgets 1 % of the unplanned peak apart, from there down, each in its own process; at most `points`."""
    name = planner.path.name.split(".json")[0]
    last, took, broken, done = -1.0, 0.0, "", 0
    for share in range(100, 0, -1):
        if done >= points:
            break
        try:
            report, cpu = planner.plan(planner.peak * share // 100, "flops")
        except (Failed, Refused) as failed:
            if "exit 3" not in str(failed):
                broken = broken or str(failed)
            break
        took, done = took + cpu, done + 1
        if report["overhead_pct"] < last - 1e-9:
            broken = broken or f"{share} % costs {report['overhead_pct']:.4f} %, {share + 1} % costs {last:.4f} %"
        last = max(last, report["overhead_pct"])
    table.add(Row(name, "monotone", f"{done} budgets", "", broken or "yes", cpu=f"{took:.2f}", good=not broken))


def table(args: argparse.Namespace) -> bool:
    result = Table()
    known = json.loads(args.peers.read_text()) if args.peers else {}
    reached = json.loads(args.reached.read_text()) if args.reached else {}
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(args.graphs.glob("*.json*")) if args.graphs else []:
            name = path.name.split(".json")[0]
            if args.graph and name not in args.graph:
                continue
            planner = Planner(args.ckpt_opt, path, Path(folder))
            rows = known.get(name, {}).get("rows", [])
            peers(result, planner, rows, not args.no_cost)
            for row in reached.get(name, []):
                compared(
                    result, planner, "reached", size(row["budget"]), row["budget"], row["flops_overhead_pct"], "flops",
                    False, ROUNDING_PCT,
                )  # fmt: skip
            for budget, theirs in SMALL_OPTIMA.get(name, []):
                compared(
                    result, planner, "optimum", size(budget), int(budget + SMALL_ROUNDING[0]), theirs, "flops", False,
                    SMALL_ROUNDING[1],
                )  # fmt: skip
            if rows:
                inverse(result, planner, rows, args.points)
            monotone(result, planner, args.steps)
        for path in sorted(args.public.glob("*.json*")) if args.public else []:
            name = path.name.split(".json")[0]
            if args.graph and name not in args.graph:
                continue
            planner = Planner(args.ckpt_opt, path, Path(folder))
            targets = [t for prefix, t in OPTIMA.items() if name == prefix or name.startswith(prefix + "_mlsys")]
            for share, theirs in targets[0] if targets else []:
                budget = int(planner.peak * share)
                limit = PLAN_CPU_S if name.startswith("random") else math.inf
                what = f"{share} of the peak"
                compared(result, planner, "optimum", what, budget, theirs, "cost", False, 0.0, limit)
                if name.startswith("random"):
                    compared(
                        result, planner, "first plan", what, budget, math.inf, "cost", False, 0.0, FIRST_CPU_S, "first",
                    )  # fmt: skip
    failed = sum(row.good is False for row in result.rows)
    passed = sum(row.good is True for row in result.rows)
    text = f"{passed} rows pass, {failed} fail\n\n{result.markdown()}"
    write(args.page, "What plans cost", text)
    return failed == 0


def write(path: Path | None, title: str, text: str) -> None:
    if path is None:
        print(text)
    else:
        path.write_text(f"# {title}\n\nMade by `python tools planner {sys.argv[1]}`.\n\n{text}")
        print(f"wrote {path}")


OPS_A_LAYER = 22


def generate(layers: int, out: Path, ops: int = 0) -> int:
    """Writes the cost graph of a training step with that many layers, padded to `ops` ops, and returns its number of
    ops.
    """
    script = options.FIXTURES / "graphs" / "make.py"
    sizes = ["--tokens", "8192", "--width", "2048", "--hidden", "5632", "--vocabulary", "4096"]
    command = [sys.executable, script, out, "--layers", layers, *sizes, "--ops", ops]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    with gzip.open(out, "rt") as file:
        return len(json.load(file)["ops"])


def torch_partition(layers: int) -> tuple[int, float] | None:
    """Returns the nodes of PyTorch's joint graph of a transformer with that many layers, and the CPU seconds of its
    partitioner at half of the saved bytes, without tracing; `None` if PyTorch is missing.
    """
    script = f"import sys; sys.argv = ['', '{layers}']\n" + TORCH_SCRIPT
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr[-600:], file=sys.stderr)
        return None
    nodes, seconds = done.stdout.split()[-2:]
    return int(nodes), float(seconds)


TORCH_SCRIPT = """
import sys, time, torch
import torch.nn as nn, torch.nn.functional as F
from torch._functorch import config
import torch._functorch.aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (t.view(b, s, 4, w // 4).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.n2(x))))

class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.table = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList([Block(256, 1024) for _ in range(layers)])
        self.head = nn.Linear(256, 1000, bias=False)
    def forward(self, ids):
        x = self.table(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x).float().square().mean()

sys.setrecursionlimit(1000000)
config.activation_memory_budget = 0.5
took = []
def partition(joint, inputs, **kwargs):
    started = time.process_time()
    done = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    took.append((len(joint.graph.nodes), time.process_time() - started))
    return done
torch.set_num_threads(1)
model = Model(int(sys.argv[1]))
ids = torch.zeros(2, 64, dtype=torch.int64)
nop = lambda graph, inputs: graph
step = torch._functorch.aot_autograd.aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
step(ids)
print(*took[-1])
"""


def curve(args: argparse.Namespace) -> bool:
    lines = ["| layers | ops | bytes of the file | first plan, CPU s | elapsed planning, s | us an op | a N log N |"]
    lines.append("|" + "---|" * 7)
    points: list[tuple[int, float, float, int, int]] = []
    ours: dict[int, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json.gz"
        wanted = {(n, 0) for n in (*args.layers, *args.torch_layers)}
        # As many layers as an exact number of ops has room for.
        wanted |= {((n - OPS_A_LAYER) // OPS_A_LAYER, n) for n in args.ops}
        for layers, exact in sorted(wanted):
            ops = generate(layers, path, exact)
            report, took = call(
                args.ckpt_opt, "plan", path, "--budget", "60%", "--objective", "flops", "--effort", "first"
            )
            points.append((ops, took, report["plan_seconds"], layers, path.stat().st_size))
            ours[layers] = (ops, took)
            print(
                f"{layers} layers, {ops} ops: {took:.2f} CPU s, {report['plan_seconds']:.3f} s planning",
                file=sys.stderr,
            )
        theirs = {}
        for layers in args.torch_layers:
            theirs[layers] = torch_partition(layers)
            print(f"PyTorch, {layers} layers: {theirs[layers]}", file=sys.stderr)
    # Least squares in the logarithm: every size counts alike.
    shape = [n * math.log2(n) for n, *_ in points]
    factor = math.exp(sum(math.log(max(t, 1e-4) / s) for (_, t, *_), s in zip(points, shape)) / len(points))
    for (ops, took, planning, layers, file_bytes), s in zip(points, shape):
        cells = (
            layers,
            ops,
            file_bytes,
            f"{took:.3f}",
            f"{planning:.3f}",
            f"{1e6 * took / ops:.1f}",
            f"{factor * s:.3f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    xs, ys = [math.log(n) for n, *_ in points], [math.log(max(t, 1e-4)) for _, t, *_ in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mx) ** 2 for x in xs)
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / spread if spread else float("nan")
    lines.append(f"\nFit: {factor * 1e6:.4f} us * N log2 N; over all sizes time grows as N^{slope:.3f}.\n")
    good = True
    if theirs:
        lines.append(
            "| layers | PyTorch's joint nodes | its partitioner, CPU s | our ops | our command, CPU s | ratio | ratio a node |"
        )
        lines.append("|" + "---|" * 7)
        for layers, answer in theirs.items():
            if answer is None:
                lines.append(f"| {layers} | PyTorch is missing or failed | | | | | |")
                good = False
                continue
            (nodes, seconds), (ops, planning) = answer, ours[layers]
            planning = max(planning, 1e-6)
            each = (seconds / nodes) / (planning / ops)
            lines.append(
                f"| {layers} | {nodes} | {seconds:.2f} | {ops} | {planning:.4f} | {seconds / planning:.0f} | {each:.0f} |"
            )
    write(args.page, "What planning costs", "\n".join(lines) + "\n")
    return good


def integers(text: str) -> list[int]:
    return [int(word) for word in options.words(text)]


def main() -> int:
    parser = options.parser(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("table", "curve"):
        verb = verbs.add_parser(name)
        options.add_binary(verb)
        options.add_page(verb)
        if name == "table":
            verb.add_argument("--graphs", type=Path)
            verb.add_argument("--peers", type=Path)
            verb.add_argument("--reached", type=Path)
            verb.add_argument("--public", type=Path)
            verb.add_argument("--graph", type=options.words, default=[], help="comma-separated names of graphs")
            verb.add_argument("--points", type=int, default=24, help="budgets of the curve for `inverse`")
            verb.add_argument("--steps", type=int, default=100, help="budgets for `monotone`, at most")
            verb.add_argument("--no-cost", action="store_true", help="leave out plans by cost at the peers' peaks")
        else:
            verb.add_argument("--layers", type=integers, default=[8, 64, 512, 4096])
            verb.add_argument("--ops", type=integers, default=[1_000_000], help="exact numbers of ops")
            verb.add_argument("--torch-layers", type=integers, default=[4, 12, 24, 48])
    args = parser.parse_args()
    args.ckpt_opt = args.ckpt_opt
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    return 0 if (table if args.verb == "table" else curve)(args) else 1
