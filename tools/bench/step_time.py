"""Compares training steps with PyTorch's: the same models, sizes and threads, in turns.

    python tools step_time --ckpt-opt BINARY [--models gpt2,bert,tiny] [--shapes 2x256,2x512] [--dtypes f32,bf16]
        [--device cpu|cuda:N] [--threads 2] [--rounds 5] [--steps 3] [--tight 50%] [--no-check] [--no-compile]
        [--overhead-seconds 60] [--folder DIR] [--page FILE.md]

Each model is built from its configuration with random weights (no network) and exported. For every shape (batch x tokens;
always 1x16 for the tiny models) these steps are compared:

    eager           PyTorch: forward, loss and the gradients of all parameters
    checkpointed    the same with torch.utils.checkpoint around every layer
    torch.compile   the same compiled, where that works on this machine
    ours            compiled with `--policy none`
    ours, planned   compiled with the peak of `checkpointed` as the budget, with the device profile of `calibrate` and the
                    times of the model's nodes at these sizes from `profile`
    ours, tight     the same with the budget `--tight`, or the smallest feasible one

Each round runs `--steps` steps of every variant, one after the other. The table lists medians over the rounds of each
round's median step, in wall time and CPU time (other load on the machine counts little in CPU time). It also lists ratios,
one for each round: the median, the least and the largest. Planned steps are compared with `checkpointed`, all others with
eager. Goals: ours at most 1.0 of eager (0.7 at 1x16), planned at most 0.9 of checkpointed.

Peaks count live bytes, not resident pages. Ours come from its allocator, which counts every block that libtorch requests.
PyTorch's come from its profiler, which sees the same requests during a step, plus parameters and tokens. `resident` is the
growth of our process after its weights were loaded, beside the bytes of the plan that are not weights or inputs, and beside
what libraries keep. Goal: without the libraries' part at most 1.03 of a plan of 1 GiB or more.

Gradients are compared in the same run: float32 with tolerance.py, bfloat16 against float64 by the root mean square of each
tensor's error; the largest error is printed too. `overhead` is the extra time of a planned step: predicted by the plan
from profiled nodes, predicted from the device's rates alone, and measured after the rounds by `ckpt-opt overhead`, with the
verdicts of overhead.py. Goal: within 3 points. An undecided verdict is listed and is no failure.

With a CUDA device both sides run there. PyTorch's peak is then its allocator's, and every step is synchronized.
`--no-check` skips the gradients, for models that do not fit in float64.

Exit code 1 if gradients differ, a measured peak differs from the predicted one, an overhead differs beyond the noise, or
the resident goal is missed. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.bench import overhead
from tools.lib import options, page
from tools.lib.compiler import Compiler, Refused, read_tensors, write_tensors
from tools.lib.models import (
    DTYPES,
    MODELS,
    Step,
    build,
    eager_step,
    export,
    gradients_by_name,
    judge_gradients,
    random_tokens,
)

TINY_MODELS = ("tiny", "llama_tiny")
SMALL = (1, 16)
MOST_RESIDENT = 1.03
PROFILED_STEPS = "9"
OURS, PLANNED, TIGHT, EAGER, CHECKPOINTED, COMPILED = (
    "ours",
    "ours, planned",
    "ours, tight",
    "eager",
    "checkpointed",
    "torch.compile",
)


@dataclass
class Case:
    """The measurements of one model, shape and dtype."""

    label: str
    figures: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Microseconds that passed and of CPU, a pair a round."""
    peaks: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def ratios(self, of: str, to: str, kind: int) -> list[float]:
        return [a[kind] / b[kind] for a, b in zip(self.figures[of], self.figures[to], strict=True)]

    def rows(self) -> list[str]:
        rows = []
        for name, rounds in self.figures.items():
            wall, cpu = (statistics.median(r[kind] for r in rounds) / 1e3 for kind in (0, 1))
            to = CHECKPOINTED if name in (PLANNED, TIGHT) else EAGER
            columns = [f"{wall:.1f}", f"{cpu:.1f}"]
            for kind in (0, 1):
                found = self.ratios(name, to, kind)
                columns.append(f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})")
            peak = f"{self.peaks[name] / 2**20:.1f}" if name in self.peaks else ""
            rows.append(f"| {self.label} | {name} | " + " | ".join(columns) + f" | {to} | {peak} |")
        return rows


def checkpointed(name: str, dtype: torch.dtype) -> torch.nn.Module:
    model = build(name, dtype).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def waited(tokens: torch.Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)


def warm(report: dict) -> tuple[float, float]:
    """Returns the median step of our run without the first step: microseconds of wall and CPU time."""
    steps = report["steps"][1:] or report["steps"]
    return statistics.median(s["time_us"] for s in steps), statistics.median(s["cpu_us"] for s in steps)


def timed(step: Step, steps: int, tokens: torch.Tensor) -> tuple[float, float]:
    """Returns the median microseconds of a step: wall and CPU time."""
    wall, cpu = [], []
    for _ in range(steps):
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        step()
        waited(tokens)
        cpu.append((time.process_time_ns() - cpu_ns) / 1e3)
        wall.append((time.perf_counter_ns() - wall_ns) / 1e3)
    return statistics.median(wall), statistics.median(cpu)


def peak_bytes(step: Step, model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Live bytes at the worst moment of a step, with parameters, buffers and tokens: what PyTorch asks its CPU allocator
    for less what it gives back, as its profiler records it in the order of the requests."""
    if tokens.is_cuda:
        waited(tokens)
        torch.cuda.reset_peak_memory_stats(tokens.device)
        before = torch.cuda.memory_allocated(tokens.device)
        step()
        waited(tokens)
        return torch.cuda.max_memory_allocated(tokens.device) - before + resident_bytes(model, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    changes = [
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in walked(profile.profiler.kineto_results.experimental_event_tree())
        if event.name == "[memory]"
    ]
    live = most = 0
    for _, change in sorted(changes, key=lambda c: c[0]):
        live += change
        most = max(most, live)
    return most + resident_bytes(model, tokens)


def resident_bytes(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    held = [*model.parameters(), *model.buffers(), tokens]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def walked(events: list) -> list:
    found, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        found.append(event)
        waiting.extend(event.children)
    return found


class Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.compiler = Compiler(arguments.ckpt_opt, 7200.0, ("--drop-output", "logits"))
        self.threads = ("--threads", str(arguments.threads), "--device", arguments.device)
        self.attention = ("--attention", arguments.attention)
        self.device = self.compiler.calibrated(folder, arguments.threads, arguments.device)

    def run(self, model: Path, feed: Path, steps: int, *more: str | Path) -> dict:
        return self.compiler.call_json("run", model, "--inputs", feed, *self.threads, *self.attention, "--steps", str(steps),
                                       *more)  # fmt: skip

    def case(self, name: str, dtype: str, batch: int, seq: int) -> Case:
        arguments, kind = self.arguments, DTYPES[dtype]
        case = Case(f"{name} {batch}x{seq} {dtype}")
        model = build(name, kind)
        place = torch.device(arguments.device)
        exported = self.folder / f"{name}-{dtype}.onnx"
        if not exported.exists():
            export(model, exported)
        tokens = random_tokens(model, batch, seq)
        feed = self.folder / "feed.npz"
        write_tensors(feed, {"input_ids": tokens.numpy(), "labels": tokens.numpy()})
        model, tokens = model.to(place), tokens.to(place)

        steps: dict[str, Step] = {EAGER: eager_step(model, tokens)}
        smaller = checkpointed(name, kind).to(place)
        steps[CHECKPOINTED] = eager_step(smaller, tokens)
        for label, of in ((EAGER, model), (CHECKPOINTED, smaller)):
            steps[label]()
            case.peaks[label] = peak_bytes(steps[label], of, tokens)
        if arguments.compile:
            try:
                compiled = eager_step(torch.compile(build(name, kind).to(place), dynamic=False), tokens)
                compiled()
                steps[COMPILED] = compiled
            except Exception as error:  # Whatever its compiler lacks here: it is compared where it works.
                case.notes.append(f"torch.compile does not work here: {str(error).splitlines()[0][:200]}")

        ours = {label: self.folder / f"{label.split()[-1]}.onnx" for label in (OURS, PLANNED, TIGHT)}
        sizes = {"batch": batch, "seq": seq}
        self.compiler.optimize(exported, ours[OURS], "none", MODELS[name][2], sizes)
        times = self.folder / "times.json"
        bound = options.dim_options(sizes)
        self.compiler.call("profile", exported, "-o", times, "--runs", PROFILED_STEPS, "--loss", MODELS[name][2], *bound,
                           *self.compiler.options, *self.threads, *self.attention)  # fmt: skip
        prices = ("--device-profile", str(self.device), "--profile", str(times))
        budgeted = Compiler(self.compiler.binary, 7200.0, (*self.compiler.options, *prices))
        plans = {}
        for label, budget in ((PLANNED, case.peaks[CHECKPOINTED]), (TIGHT, arguments.tight)):
            decided = self.folder / f"{label.split()[-1]}.plan.json"
            planning = Compiler(budgeted.binary, budgeted.timeout_s, (*budgeted.options, "--plan-out", str(decided)))
            plans[label] = planning.optimize(exported, ours[label], f"budget:{budget}", MODELS[name][2], sizes)
            rated = self.compiler.call_json("plan", exported, "--plan-in", decided, "--loss", MODELS[name][2], *bound,
                                            *self.compiler.options, "--device-profile", self.device)  # fmt: skip
            plans[label]["rated_pct"] = rated["overhead_pct"]
            case.notes.append(f"{label}: a budget of {plans[label]['budget_bytes']} bytes")
        if arguments.check:
            self.check(case, model, steps[EAGER], ours, feed, tokens, name)

        reports: dict[str, dict] = {}
        case.figures = {label: [] for label in (*ours, *steps)}
        for _ in range(arguments.rounds):
            for label, path in ours.items():
                # One step warms up: the pages of the arena are fresh in it.
                reports[label] = self.run(path, feed, arguments.steps + 1)
                case.figures[label].append(warm(reports[label]))
            for label, step in steps.items():
                step()
                case.figures[label].append(timed(step, arguments.steps, tokens))
        for label, report in reports.items():
            case.peaks[label] = report["measured_peak_bytes"]
            if place.type == "cpu" and report["measured_peak_bytes"] != report["predicted_peak_bytes"]:
                case.wrong.append(
                    f"{label}: peak {report['measured_peak_bytes']} B, not {report['predicted_peak_bytes']}"
                )
            grown = report["measured_peak_bytes"] - report["static_bytes"]
            if report["resident_bytes"]:
                share = report["resident_bytes"] / grown
                beside_libraries = report["resident_bytes"] - (report["workspace_bytes"] or 0)
                if grown >= 2**30 and beside_libraries > MOST_RESIDENT * grown:
                    case.wrong.append(f"{label}: {beside_libraries} B resident for a plan of {grown}")
                case.notes.append(
                    f"{label}: resident {report['resident_bytes'] / 2**20:.1f} MiB, {share:.3f} of the {grown / 2**20:.1f}"
                    f" MiB beside weights and inputs; libraries keep {(report['workspace_bytes'] or 0) / 2**20:.1f} MiB"
                )
        if arguments.overhead_seconds > 0:
            self.overheads(case, ours, plans, feed)
        return case

    def overheads(self, case: Case, ours: dict[str, Path], plans: dict[str, dict], feed: Path) -> None:
        """Compares the measured overhead of planned steps with what their plans predict."""
        for label, plan in plans.items():
            if not plan["segments"]:
                case.notes.append(f"{label}: nothing is recomputed")
                continue
            measured = self.compiler.call_json(
                "overhead", ours[OURS], ours[label], "--inputs", feed, "--seconds", str(self.arguments.overhead_seconds),
                *self.threads, *self.attention,
            )  # fmt: skip
            found = overhead.Overhead(plan["overhead_pct"], measured)
            rated = overhead.Overhead(plan["rated_pct"], measured)
            case.notes.append(
                f"{label}: {found.line('time')}; by the device's rates alone {rated.predicted_pct:.1f} %: {rated.verdict('time')}"
            )
            if found.verdict("time") == "differs":
                case.wrong.append(f"{label}: {found.line('time')}")

    def check(
        self, case: Case, model: torch.nn.Module, step: Step, ours: dict[str, Path], feed: Path, tokens: torch.Tensor,
        name: str,
    ) -> None:  # fmt: skip
        """Compares the gradients of all our graphs with PyTorch's."""
        theirs = gradients_by_name(model, step())
        exact = None
        if case.label.endswith("bf16"):
            wide = build(name, torch.bfloat16).to(tokens.device).double()
            exact = gradients_by_name(wide, eager_step(wide, tokens)())
        for label, path in ours.items():
            outputs = path.with_suffix(".safetensors")
            self.run(path, feed, 1, "--outputs", outputs)
            found = read_tensors(outputs)
            table = self.compiler.inspect(path)["parameters"]
            worst, largest = judge_gradients(table, found, model, theirs, exact)
            if largest is not None:
                case.notes.append(f"gradients, {label}, by their largest error: {largest}")
            case.notes.append(f"gradients, {label}: {worst}")
            if not worst.agrees:
                case.wrong.append(f"{label}: gradients: {worst}")
            outputs.unlink()


def shapes(text: str) -> list[tuple[int, int]]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"expected BATCHxTOKENS,…, not {text}")
    pairs = (shape.split("x") for shape in text.split(","))
    return [(int(batch), int(tokens)) for batch, tokens in pairs]


def place_name(device: str) -> str:
    return platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)


HEAD = """| case | step | ms | CPU ms | ratio of time | ratio of CPU time | to | peak MiB |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--models", type=options.words_of(MODELS), default=["gpt2", "bert", "tiny"])
    parser.add_argument("--shapes", type=shapes, default=shapes("2x256,2x512"))
    parser.add_argument("--dtypes", type=options.words_of(DTYPES), default=list(DTYPES))
    options.add_counts(parser, threads=2, rounds=5, steps=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--attention", choices=("auto", "tiles"), default="auto", help="kernels of attention that ours may take"
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave gradients out")
    parser.add_argument("--tight", default="50%", help="the budget of the tight plan [default: 50%%]")
    parser.add_argument("--overhead-seconds", type=int, default=60, metavar="S",
                        help="measure the overhead of a plan for so long, or for six pairs of steps; 0: not at all")  # fmt: skip
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument(
        "--folder", type=Path, help="keep exports and the device's profile here, and take them from here"
    )
    options.add_page(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = [(m, d, *s) for m in arguments.models for d in arguments.dtypes
             for s in ([SMALL] if m in TINY_MODELS else arguments.shapes)]  # fmt: skip
    lines = [
        page.head(
            place_name(arguments.device), arguments.threads, f"torch {torch.__version__}",
            f"{arguments.rounds} rounds of {arguments.steps} steps", page.load(),
        ), "", HEAD,
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    notes, wrong = [], []
    with options.folder_or_scratch(arguments.folder) as folder:
        bench = Bench(arguments, folder)
        for chosen in cases:
            label = f"{chosen[0]} {chosen[2]}x{chosen[3]} {chosen[1]}"
            try:
                case = bench.case(*chosen)
            except Refused as refused:
                case = Case(label, wrong=[f"refused: {refused}"])
            rows = case.rows()
            print("\n".join(rows), flush=True)
            lines += rows
            notes += [f"{label}: {note}" for note in case.notes]
            wrong += [f"{label}: {line}" for line in case.wrong]
            torch._dynamo.reset()
    return page.finish("Steps", lines, notes, wrong, arguments.page)
