"""Plans of ranks that keep slices of their parameters: when to gather again, and what models of 1 to 405 billion parameters take.

    python tools sharded_plans --ckpt-opt BINARY [--points 10] [--page FILE.md] [--picture FILE.svg]

Nothing is run and no weight exists: models are written without weights (tools/lib/llama.py). The first table is the frontier of
Llama-3.2-1B on 8 ranks, with every gather left to the plan, beside plans that gather each parameter again in the backward pass
(the default of PyTorch's FSDP) and plans that keep each. The second table has three Llamas on 8, 64 and 1,024 H100s.

Exit code 1 if the plan takes more time than one of the others at any budget.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.lib import llama, options
from tools.lib.chart import Axis, Curve, chart
from tools.lib.compiler import Compiler, Refused

STEP = (
    "--loss", "causal-lm", "--drop-output", "*", "--optimizer", "adamw", "--fuse-optimizer", "--master-weights", "--shard",
    "params",
)  # fmt: skip
CURVES = {"planned": (), "always": ("--recompute-ops", "AllGather"), "never": ("--save-ops", "AllGather")}
"""What each curve asks of the nodes that gather parameters."""
WORDS = {"planned": "planned", "always": "always gathered again", "never": "always kept"}
COLORS = {"planned": "#1f5fa8", "always": "#e08e0b", "never": "#2e8b57"}
FAST = ("--effort", "first")
SEQUENCE = 8192
LINKS = {8: (450.0, 10.0), 64: (50.0, 20.0), 1024: (50.0, 20.0)}
"""By number of devices: gigabytes per second and microseconds of the link."""
LINK_SOURCES = (
    "8 devices: NVLink, 450 GB/s each way by the H100 datasheet",
    "64 and 1,024 devices: one 400 Gb/s port for each device",
    "latencies are assumptions, not measured",
)


@dataclass(frozen=True)
class Point:
    """One budget; the overhead of each curve, in percent of the step without recomputation."""

    budget_bytes: int
    overhead: dict[str, float | None]
    bound: float | None


def frontier(compiler: Compiler, model: Path, points: int) -> list[Point]:
    """Returns the three curves at the same budgets."""
    step = (
        *STEP, *on_device(8, model.parent), "--dim", "batch=1", "--dim", f"seq={SEQUENCE}", "--tile-loss", "8", "--mesh", "dp=8",
    )  # fmt: skip
    planned = compiler.call_json("frontier", model, *step, "--points", points, *FAST)
    budgets = [point["budget_bytes"] for point in planned["points"]]
    curves = {"planned": planned}
    for name, asked in CURVES.items():
        if asked:
            given = ("--budgets", ",".join(map(str, budgets)))
            curves[name] = compiler.call_json("frontier", model, *step, *asked, *given, *FAST)
    rows = zip(*(curve["points"] for curve in curves.values()), strict=True)
    return [
        Point(
            row[0]["budget_bytes"],
            dict(zip(curves, (p["overhead_pct"] for p in row), strict=True)),
            row[0]["lower_bound_pct"],
        )
        for row in rows
    ]


def on_device(devices: int, folder: Path) -> tuple[str, str]:
    """Returns the option for the profile of an H100 with the link of so many devices."""
    built_in = json.loads((options.ROOT / "passes/analysis/devices/h100.json").read_text())
    speed, latency = LINKS[devices]
    path = folder / f"h100-{devices}.json"
    path.write_text(json.dumps(built_in | {"link_gigabytes_per_s": speed, "link_us": latency}))
    return "--device-profile", str(path)


def too_dear(points: list[Point]) -> list[int]:
    """Returns the budgets at which the plan takes more time than another curve."""

    def is_above(point: Point) -> bool:
        ours = point.overhead["planned"]
        others = (point.overhead[name] for name in CURVES if name != "planned")
        return any(other is not None and (ours is None or ours > other + 1e-9) for other in others)

    return [point.budget_bytes for point in points if is_above(point)]


def frontier_lines(points: list[Point]) -> list[str]:
    def cell(percent: float | None) -> str:
        return "does not fit" if percent is None else f"{percent:.2f} %"

    lines = ["| budget | planned | proven bound | always gathered again | always kept |", "|---|---|---|---|---|"]
    for point in points:
        cells = [point.overhead["planned"], point.bound, point.overhead["always"], point.overhead["never"]]
        lines.append(f"| {point.budget_bytes / 1e9:.3f} GB | " + " | ".join(map(cell, cells)) + " |")
    return lines


@dataclass(frozen=True)
class Step:
    """A planned step of one of many devices."""

    model: llama.Llama
    devices: int
    report: dict | None
    smallest_bytes: int | None
    usable_bytes: int

    def line(self) -> str:
        name = f"| {self.model.name} | {self.devices:,} "
        if self.report is None:
            smallest = "" if self.smallest_bytes is None else f"{self.smallest_bytes / 1e9:.1f} GB"
            return f"{name}| {smallest} | | | | | memory |"
        report = self.report
        link_s, all_s = report["link_cost"] / 1e6, report["cost_after"] / 1e6
        limit = "link" if link_s > all_s - link_s else "arithmetic"
        return (
            f"{name}| {report['peak_after_bytes'] / 1e9:.1f} GB | {report['static_bytes'] / 1e9:.2f} GB "
            f"| {report['link_bytes'] / 1e9:.1f} GB | {link_s:.2f} s | {all_s - link_s:.2f} s | {limit} |"
        )


def planned_step(compiler: Compiler, model: llama.Llama, devices: int, folder: Path) -> Step:
    path = folder / f"{model.name}.onnx"
    device = on_device(devices, folder)
    step = (
        *STEP, *device, "--dim", "batch=1", "--dim", f"seq={SEQUENCE}", "--tile-loss", "16", "--mesh", f"dp={devices}", *FAST,
    )  # fmt: skip
    profile = json.loads(Path(device[1]).read_text())
    usable_bytes = profile["memory_bytes"] - profile["reserved_bytes"]
    try:
        report = compiler.call_json("plan", path, *step, "--budget", "auto", "--no-smallest")
    except Refused as refused:
        if refused.smallest_budget is None:
            raise
        return Step(model, devices, None, int(refused.smallest_budget), usable_bytes)
    return Step(model, devices, report, None, usable_bytes)


def steps_lines(steps: list[Step]) -> list[str]:
    head = (
        "model",
        "devices",
        "peak of a rank",
        "of it resident",
        "received in a step",
        "link",
        "arithmetic",
        "what limits",
    )
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(step.line() for step in steps)]


def picture(points: list[Point]) -> str:
    """Draws the three curves and the bound: time that a plan adds, over the budget."""

    def curve(label: str, color: str, values: list[float | None], is_dashed: bool = False) -> Curve:
        pairs = zip(points, values, strict=True)
        known = [(point.budget_bytes, max(value, 0)) for point, value in pairs if value is not None]
        return Curve(label, color, known, is_dashed=is_dashed)

    curves = [curve(WORDS[name], COLORS[name], [point.overhead[name] for point in points]) for name in CURVES]
    curves.append(curve("proven lower bound", "#c0392b", [point.bound for point in points], is_dashed=True))
    most = max(percent for each in curves for _, percent in each.points)
    budgets = [point.budget_bytes for point in points]
    x = [min(budgets) + (max(budgets) - min(budgets)) * tick / 4 for tick in range(5)]
    y = [most * tick / 4 for tick in range(5)]
    return chart(
        curves,
        Axis("budget of a rank, GB", [(tick, f"{tick / 1e9:.2f}") for tick in x]),
        Axis("extra time by the cost model, %", [(tick, f"{tick:.1f}") for tick in y]),
    )


def page(points: list[Point], steps: list[Step]) -> str:
    command = (
        "python tools sharded_plans --ckpt-opt BINARY --page docs/sharded-plans.md --picture docs/pictures/gathers.svg"
    )
    usable = steps[0].usable_bytes / 1e9
    lines = [
        "# Plans with sharded parameters",
        "",
        f"`{command}` wrote this page.",
        "Nothing was run: all figures are predictions for H100s, by the cost model and the link in the device profile. One sequence of 8,192 tokens for each rank, bfloat16, AdamW with float32 master weights, `--shard params`,",
        "updates as soon as each gradient is complete, the loss in chunks.",
        "",
        "## When to gather again",
        "",
        "Llama-3.2-1B on 8 ranks: the time that a plan adds to the step without recomputation, by budget. *Always gathered again* is",
        "`--recompute-ops AllGather` (the default of PyTorch's FSDP), *always kept* is `--save-ops AllGather`. In both, the plan",
        "still chooses all other recomputations.",
        "",
        *frontier_lines(points),
        "",
        "![Extra time over the budget of a rank](pictures/gathers.svg)",
        "",
        "## Models on many devices",
        "",
        f"One budget for all rows: what an H100 has for a plan, {usable:.1f} GB. Where no plan fits, the smallest peak of a known plan is",
        "given. *Received* is what one rank gets from all others; *link* and *arithmetic* are times if nothing ran beside anything,",
        "recomputation included.",
        "",
        *steps_lines(steps),
        "",
        "Links: " + ";\n".join(LINK_SOURCES) + ".",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_counts(parser, points=10)
    options.add_page(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the frontier")
    asked = parser.parse_args()
    compiler = Compiler(asked.ckpt_opt, timeout_s=3600)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in llama.LLAMAS.values():
            llama.write(model, folder / f"{model.name}.onnx")
        points = frontier(compiler, folder / "Llama-3.2-1B.onnx", asked.points)
        print("\n".join(frontier_lines(points)), flush=True)
        steps = []
        for model in llama.LLAMAS.values():
            if not model.tied:
                for devices in LINKS:
                    steps.append(planned_step(compiler, model, devices, folder))
                    print(steps[-1].line(), flush=True)
    if asked.page:
        asked.page.write_text(page(points, steps))
    if asked.picture:
        asked.picture.write_text(picture(points))
    dear = too_dear(points)
    for budget in dear:
        print(f"at {budget} bytes the plan takes more time than one that is told what to gather")
    return 1 if dear else 0
