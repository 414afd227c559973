#!/usr/bin/env python3
"""Training steps of ours against PyTorch's: the same models, sizes and threads, in turns.

    python tools/step_time.py --ckpt-opt BINARY [--models gpt2,bert,tiny] [--shapes 2x256,2x512] [--dtypes f32,bf16]
        [--device cpu|cuda:N] [--threads 2] [--rounds 5] [--steps 3] [--tight 50%] [--no-check] [--no-compile]
        [--overhead-seconds 60] [--folder DIR] [--page FILE.md]

Builds each model from its configuration with random weights (no network) and exports it. For every shape (batch x
tokens; the tiny models are always 1x16) it compares

    eager           PyTorch: forward, loss and the gradients of all parameters
    checkpointed    the same with torch.utils.checkpoint around every layer
    torch.compile   the same compiled, where that works on this machine
    ours            compiled with `--policy none`
    ours, planned   compiled with `--budget` = the peak of `checkpointed`, by what `calibrate` has measured of the device
                    and `profile` of the model's nodes at these sizes
    ours, tight     the same with `--tight`, which is a budget as the binary takes it, or the smallest that can be

Each round runs `--steps` steps of every variant, one after the other. Printed are the medians over the rounds of each
round's median step, as time that passes and as CPU time of the process (other load on the machine counts little in
that), and ratios: of each round's pair, then the median, the least and the largest. A planned step is compared with
`checkpointed`, everything else with eager. Goals: ours at most 1.0 of eager (0.7 at 1x16), planned at most 0.9 of
checkpointed.

Peaks are of live bytes, not of resident pages: ours by its allocator, which counts every block that libtorch asks for;
PyTorch's by its profiler, which sees the same requests, from the first of a step to its last, beside parameters and
tokens. `resident` is by how much ours' own pages grew since its weights were in place, beside the bytes of the plan
that are not weights or inputs, and what libraries keep for themselves. Goal: without the latter at most 1.03 of a plan
of 1 GiB or more.

Gradients are compared in the same run: float32 as tolerance.py allows two float32 programs, bfloat16 against
float64 by the root mean square of each tensor's error, with the largest beside it.
`overhead` is what a planned step takes more than the unplanned one: predicted by the plan, by what was profiled and by
the device's rates alone, and measured after the rounds by `ckpt-opt overhead`, as overhead.py says. Goal: within 3 points. One that the
noise leaves undecided is listed as such, and is not wrong.

On a CUDA device both sides run there: PyTorch's peak is then that of its allocator, and every step is waited for.
`--no-check` leaves the gradients out, where a model in float64 would not fit.

Exit 1 if gradients differ, a measured peak is not the predicted one, an overhead is further off than the goal beyond the
noise, or more is resident than the goal. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matching
import numpy as np
import overhead
import page
import tolerance
import torch
import transformers as tf
from compiler import Compiler, Refused, read_tensors, write_tensors
from options import listed
from reference import Reference

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TINY = dict(vocab_size=347, n_positions=128, n_embd=24, n_layer=2, n_head=4, n_inner=40, bos_token_id=0, eos_token_id=0)

LLAMA_1B = dict(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=500000.0),
)  # fmt: skip
LLAMA_TINY = LLAMA_1B | dict(vocab_size=347, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, head_dim=8)  # fmt: skip
# Wide words beside a narrow model, as there.
LLAMA_SMALL = LLAMA_1B | dict(vocab_size=32768, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
                              num_attention_heads=8, num_key_value_heads=2)  # fmt: skip

# Model class, configuration, loss as `--loss` names it.
MODELS: dict[str, tuple[type, tf.PretrainedConfig, str]] = {
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(use_cache=False, **NO_DROPOUT), "causal-lm"),
    "tiny": (tf.GPT2LMHeadModel, tf.GPT2Config(use_cache=False, **NO_DROPOUT, **TINY), "causal-lm"),
    "bert": (
        tf.BertForMaskedLM,
        tf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "cross-entropy",
    ),
    "llama1b": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_1B), "causal-lm"),
    "llama_small": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_SMALL), "causal-lm"),
    "llama_tiny": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_TINY), "causal-lm"),
}
TINY_MODELS = ("tiny", "llama_tiny")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SMALL = (1, 16)
MOST_RESIDENT = 1.03
PROFILED_STEPS = "9"
OURS, PLANNED, TIGHT, EAGER, CHECKPOINTED, COMPILED = "ours", "ours, planned", "ours, tight", "eager", "checkpointed", "torch.compile"
Step = Callable[[], tuple[torch.Tensor, ...]]


@dataclass
class Case:
    """What was measured of one model, shape and dtype."""

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


def built(name: str, dtype: torch.dtype) -> torch.nn.Module:
    model_class, config, _ = MODELS[name]
    torch.manual_seed(0)
    model = model_class(copy.deepcopy(config)).eval()
    with torch.no_grad():
        # Norms start as ones and biases as zeros: the exporter would merge those that are equal.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(dtype)


def export(model: torch.nn.Module, path: Path) -> None:
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    program = torch.onnx.export(
        Logits(), (), kwargs={"input_ids": torch.zeros((2, 16), dtype=torch.int64)}, dynamo=True, opset_version=18,
        input_names=["input_ids"], dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}}, output_names=["logits"],
        verbose=False,
    )  # fmt: skip
    program.save(str(path), external_data=True)


def eager_step(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> tuple[torch.Tensor, ...]:
        loss = model(input_ids=tokens, labels=tokens).loss
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def checkpointed(name: str, dtype: torch.dtype) -> torch.nn.Module:
    model = built(name, dtype).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def waited(tokens: torch.Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)


def warm(report: dict) -> tuple[float, float]:
    """The median step of a run of ours, without its first: microseconds that pass and of CPU."""
    steps = report["steps"][1:] or report["steps"]
    return statistics.median(s["time_us"] for s in steps), statistics.median(s["cpu_us"] for s in steps)


def timed(step: Step, steps: int, tokens: torch.Tensor) -> tuple[float, float]:
    """Medians of microseconds that pass and of CPU."""
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


# What `export` puts before every parameter's name.
INSIDE = "model."


def arrays(model: torch.nn.Module, gradients: tuple[torch.Tensor | None, ...]) -> dict[str, np.ndarray]:
    names = [INSIDE + name for name, p in model.named_parameters() if p.requires_grad]
    return {n: g.cpu().double().numpy() for n, g in zip(names, gradients, strict=True) if g is not None}


def tied(model: torch.nn.Module) -> dict[str, str]:
    """The other names of parameters that have several."""
    first = {id(p): INSIDE + name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {INSIDE + name: first[id(p)] for name, p in every if INSIDE + name != first[id(p)]}


class Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.compiler = Compiler(arguments.ckpt_opt.resolve(), 7200.0, ("--drop-output", "logits"))
        self.threads = ("--threads", str(arguments.threads), "--device", arguments.device)
        self.attention = ("--attention", arguments.attention)
        self.device = folder / f"device-{arguments.device.replace(':', '')}-{arguments.threads}.json"
        if not self.device.exists():
            self.compiler.call("calibrate", "-o", self.device, *self.threads)

    def run(self, model: Path, feed: Path, steps: int, *more: str | Path) -> dict:
        return self.compiler.call_json("run", model, "--inputs", feed, *self.threads, *self.attention, "--steps", str(steps),
                                       *more)  # fmt: skip

    def case(self, name: str, dtype: str, batch: int, seq: int) -> Case:
        arguments, kind = self.arguments, DTYPES[dtype]
        case = Case(f"{name} {batch}x{seq} {dtype}")
        model = built(name, kind)
        place = torch.device(arguments.device)
        exported = self.folder / f"{name}-{dtype}.onnx"
        if not exported.exists():
            export(model, exported)
        torch.manual_seed(batch * seq)
        tokens = torch.randint(3, model.config.vocab_size, (batch, seq))
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
                compiled = eager_step(torch.compile(built(name, kind).to(place), dynamic=False), tokens)
                compiled()
                steps[COMPILED] = compiled
            except Exception as error:  # Whatever its compiler lacks here: it is compared where it works.
                case.notes.append(f"torch.compile does not work here: {str(error).splitlines()[0][:200]}")

        ours = {label: self.folder / f"{label.split()[-1]}.onnx" for label in (OURS, PLANNED, TIGHT)}
        sizes = {"batch": batch, "seq": seq}
        self.compiler.optimize(exported, ours[OURS], "none", MODELS[name][2], sizes)
        times = self.folder / "times.json"
        bound = [word for dim, size in sizes.items() for word in ("--dim", f"{dim}={size}")]
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
                case.wrong.append(f"{label}: peak {report['measured_peak_bytes']} B, not {report['predicted_peak_bytes']}")
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
        """What planned steps take more than the unplanned one, held against what their plans say."""
        for label, plan in plans.items():
            if not plan["segments"]:
                case.notes.append(f"{label}: nothing is computed again")
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
        """All of our graphs against PyTorch's gradients."""
        theirs = arrays(model, step())
        exact = None
        if case.label.endswith("bf16"):
            wide = built(name, torch.bfloat16).to(tokens.device).double()
            exact = arrays(wide, eager_step(wide, tokens)())
        for label, path in ours.items():
            outputs = path.with_suffix(".safetensors")
            self.run(path, feed, 1, "--outputs", outputs)
            found = read_tensors(outputs)
            table = self.compiler.inspect(path)["parameters"]
            same = matching.match(table, Reference(theirs, tied(model)), None)
            a, b = same.gradients(found, theirs)
            if exact is None:
                worst = tolerance.compare(a, b, tolerance.largest(b))
            else:
                c = same.gradients(found, exact)[1]
                worst = tolerance.compare_half(a, b, c, tolerance.root_mean_square)
                case.notes.append(f"gradients, {label}, by their largest error: {tolerance.compare_half(a, b, c)}")
            case.notes.append(f"gradients, {label}: {worst}")
            if not worst.agrees:
                case.wrong.append(f"{label}: gradients: {worst}")
            outputs.unlink()


def shapes(text: str) -> list[tuple[int, int]]:
    found = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    if any(len(shape) != 2 or min(shape) < 1 for shape in found):
        raise argparse.ArgumentTypeError(f"expected BATCHxTOKENS,…, not {text}")
    return found


def place_name(device: str) -> str:
    return platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)


HEAD = """| case | step | ms | CPU ms | ratio of time | ratio of CPU time | to | peak MiB |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--models", type=listed(MODELS), default=["gpt2", "bert", "tiny"])
    parser.add_argument("--shapes", type=shapes, default=shapes("2x256,2x512"))
    parser.add_argument("--dtypes", type=listed(DTYPES), default=list(DTYPES))
    for option, default in (("threads", 2), ("rounds", 5), ("steps", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", choices=("auto", "tiles"), default="auto", help="kernels of attention that ours may take")
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave gradients out")
    parser.add_argument("--tight", default="50%", help="the budget of the tight plan [default: 50%%]")
    parser.add_argument("--overhead-seconds", type=int, default=60, metavar="S",
                        help="measure the overhead of a plan for so long, or for six pairs of steps; 0: not at all")  # fmt: skip
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--folder", type=Path, help="keep exports and the device's profile here, and take them from here")
    parser.add_argument("--page", type=Path, help="write the table as Markdown")
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
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
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


if __name__ == "__main__":
    sys.exit(main())
