"""Compares training through the Python package with PyTorch's own ways to save memory, at their own peaks.

    python tools torch-peers --ckpt-opt BINARY [--inner aot_eager,inductor] [--model llama,…] [--size 8x64] [--wide]
        [--results FILE.jsonl] [--page FILE.md]

Each row is a small model of transformers or timm, a way to compile it and a peer:

  min-cut B   PyTorch's partitioner with `activation_memory_budget` B, on the same joint graph
  checkpoint  the checkpointing that the model's library offers: every layer is recomputed; op by op only

Our plan gets the peer's measured peak as its budget, and minimizes what the column compares: FLOPs, or time. Columns:

  peak     the peer's, in percent of the unplanned peak; both above parameters and inputs
  FLOPs    what each adds to the unplanned step, in percent
  bound    what every plan within that peak adds at least, by our proof, in percent of the unplanned step
  step     the time of our step over that of the peer's, compiled alike; the median of interleaved steps
  no plan  the same of a step that is compiled without a budget: what recomputing nothing gives, whatever memory it takes

By inductor, FLOPs are those of the plan that is timed. A model that takes no inputs of the length that is asked for gets half of
it. A row fails if our step takes more memory than the peer's by more than 64 bytes, or, op by op, adds more FLOPs. A budget that is
refused with a reason does not fail. Rows in the results file are not measured again. PyTorch is needed
(tools/requirements-torch.txt). Exit code 0 if no row fails, else 1.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.flop_counter import FlopCounterMode

from tools.bench.suite import corrected
from tools.bench.torch_budgets import INNER, MODELS, TOLERANCE_BYTES, built, loss_of
from tools.lib import options, page, results, shrink, zoo
from tools.lib.model_inputs import Sizes
from tools.lib.results import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/python"))

import ckpt_opt
from ckpt_opt.prices import allocated_bytes, flops_of

MIN_CUT = {"min-cut 1": 1.0, "min-cut 0.5": 0.5, "min-cut 0.25": 0.25, "min-cut 0.1": 0.1}
CHECKPOINT = "checkpoint"
PEERS = (*MIN_CUT, CHECKPOINT)
OBJECTIVES = ("flops", "cost")
"""What our plans minimize; the last is timed."""
ROUNDS = 9
SECONDS = 3.0
"""Steps are timed for at least so many rounds, and so long."""
NUMBERS = itertools.count()
Step = Callable[[], torch.Tensor]


def compiled(model: torch.nn.Module, inputs: dict[str, torch.Tensor], backend: Any) -> Step:
    """Returns a step that is compiled by a backend, and has run once."""

    def run(**named: torch.Tensor) -> torch.Tensor:
        return loss_of(model(**named))

    # Compiled code is looked up by code object, whatever the backend.
    run.__code__ = run.__code__.replace(co_name=f"run_{next(NUMBERS)}")
    step = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)
    step(**inputs).backward()
    return lambda: step(**inputs)


class MinCut(CustomPartitionerFn):
    """PyTorch's partitioner, with the FLOPs of the passes that it made."""

    flops = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passes = min_cut_rematerialization_partition(*args, **kwargs)
        nodes = (node for module in passes for node in module.graph.nodes if node.op == "call_function")
        self.flops = sum(map(node_flops, nodes))
        return passes

    def uuid(self) -> str:
        return type(self).__name__


def min_cut(model: torch.nn.Module, inputs: dict[str, torch.Tensor], inner: str, budget: float) -> tuple[Step, int]:
    """Returns a step that PyTorch's partitioner planned, on the joint graph that ours gets, and its FLOPs."""
    partition = MinCut()
    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False), corrected():
        if inner == "inductor":
            with inductor.patch(custom_partitioner_fn=partition, fx_graph_cache=False):
                return compiled(model, inputs, "inductor"), partition.flops
        backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition)
        return compiled(model, inputs, backend), partition.flops


def node_flops(node: torch.fx.Node) -> int:
    values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return flops_of(node.target, values, node.meta.get("val"))


def plan_flops(plan: ckpt_opt.Plan, schedule: Iterable[int]) -> int:
    return sum(plan.graph["ops"][op]["flops"] for op in schedule)


def eager_flops(model: torch.nn.Module, step: Step) -> int:
    """Returns the FLOPs of a step that is not compiled."""
    model.zero_grad(set_to_none=True)
    with corrected(), FlopCounterMode(display=False) as counter:
        step().backward()
    return counter.get_total_flops()


def checkpointed(model: Any) -> Any:
    """Returns a copy of a model that recomputes every layer; None if its library offers no checkpointing."""
    other = copy.deepcopy(model)
    if getattr(other, "supports_gradient_checkpointing", False):
        other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(other, "set_grad_checkpointing"):
        other.set_grad_checkpointing()
    else:
        return None
    return other


def peak_of(model: torch.nn.Module, step: Step) -> int:
    model.zero_grad(set_to_none=True)
    gc.collect()
    return allocated_bytes(lambda: step().backward())[0]


def step_times(*steps: tuple[torch.nn.Module, Step]) -> list[float]:
    """Returns the median time of each step, which comes with its model; they take turns."""
    seconds: list[list[float]] = [[] for _ in steps]
    begun = time.perf_counter()
    while len(seconds[0]) < ROUNDS or time.perf_counter() < begun + SECONDS:
        for (model, step), taken in zip(steps, seconds, strict=True):
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            step().backward()
            taken.append(time.perf_counter() - start)
    return list(map(statistics.median, seconds))


def compare(model: torch.nn.Module, inputs: dict[str, torch.Tensor], inner: str, peer: str) -> Row:
    """Measures a peer, and our plans within its peak."""
    torch._dynamo.reset()
    # Layers are recomputed in training only.
    model.train()
    free = compiled(model, inputs, ckpt_opt.backend(policy="none", inner="aot_eager"))
    unplanned = peak_of(model, free)
    plan = ckpt_opt.last_plans[-1]
    if inner == "inductor":
        free, _ = min_cut(model, inputs, inner, 1.0)
    least = plan_flops(plan, range(len(plan.graph["ops"])))
    other: Any = model
    if peer == CHECKPOINT:
        other = checkpointed(model)
        if other is None:
            return {"left_out": "the model offers no checkpointing"}
        theirs = lambda: loss_of(other(**inputs))  # noqa: E731
        eager = eager_flops(model, lambda: loss_of(model(**inputs)))
        added = eager_flops(other, theirs) / eager - 1 if eager else 0
        if not added:
            return {"left_out": "no layer is recomputed"}
    else:
        try:
            theirs, flops = min_cut(model, inputs, inner, MIN_CUT[peer])
        except RuntimeError as error:
            cause = getattr(error, "inner_exception", error)
            return {"left_out": f"the peer fails: {cause}".split("\n")[0][:120]}
        added = flops / least - 1 if least else 0
    peak = peak_of(other, theirs)
    row: Row = {"unplanned": unplanned, "peak": peak, "flops_pct": 100 * added}
    for objective in OBJECTIVES if inner == "aot_eager" else OBJECTIVES[-1:]:
        infeasible = "smallest" if inner == "aot_eager" else "raise"
        ask: dict[str, Any] = {"inner": inner, "objective": objective, "on_infeasible": infeasible}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ours = compiled(model, inputs, ckpt_opt.backend(plan.static_bytes + peak, **ask))
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, ckpt_opt.BudgetError):
                    raise
                return row | {"left_out": f"refused: {error.inner_exception}".split("\n")[0]}
        found = ckpt_opt.last_plans[-1]
        flops = plan_flops(found, found.decisions["schedule"])
        row[objective] = {"peak": peak_of(model, ours), "flops_pct": 100 * (flops / least - 1) if least else 0}
        row[objective]["bound_pct"] = found.lower_bound_pct
    own, their, without = step_times((model, ours), (other, theirs), (model, free))
    return row | {"step": round(own / their, 3), "no_plan": round(without / their, 3)}


def wrong(row: Row) -> str:
    """Returns what is wrong with a row, if anything is."""
    if "failed" in row:
        return str(row["failed"])
    if "left_out" in row:
        return ""
    found = [
        f"{row[objective]['peak']} bytes, {row['peak']} by the peer"
        for objective in OBJECTIVES
        if objective in row and row[objective]["peak"] > row["peak"] + TOLERANCE_BYTES
    ]
    if "flops" in row and row["flops"]["flops_pct"] > row["flops_pct"] + 1e-9:
        found.append(f"+{row['flops']['flops_pct']:.2f} % FLOPs, +{row['flops_pct']:.2f} % by the peer")
    return "; ".join(found)


def key(row: Row) -> str:
    return f"{row['model']} {row.get('inner', 'aot_eager')} {row['peer']} {row['size']}"


def table(measured_rows: list[Row]) -> list[str]:
    lines = [
        "| model | compiled by | peer | peak, % | its FLOPs, % | our FLOPs, % | bound, % | step | no plan |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in measured_rows:
        if "peak" not in row or "left_out" in row:
            continue
        ours = row["flops"] if "flops" in row else row["cost"]
        lines.append(
            f"| {row['model']} | {row['inner']} | {row['peer']} | {100 * row['peak'] / row['unplanned']:.0f} | +{row['flops_pct']:.1f} "
            f"| +{ours['flops_pct']:.1f} | {bound(row)} | {row['step']:.2f} | {row['no_plan']:.2f} |"
        )
    return lines


def bound(row: Row) -> str:
    known = row.get("flops", {}).get("bound_pct")
    return "" if known is None else f"+{known:.1f}"


def fitting(name: str, size: Sizes, wide: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a small model and inputs, of half the length if it takes no longer ones."""
    cuts = (shrink.WIDE,) if wide else shrink.CUTS
    try:
        return built(name, size, cuts)
    except zoo.Unbuilt:
        return built(name, Sizes(size.batch, size.seq // 2), cuts)


def size_of(text: str) -> Sizes:
    batch, rows = text.split("x")
    return Sizes(int(batch), int(rows))


def main() -> int:
    arguments = options.with_binary(__doc__)
    arguments.add_argument("--inner", type=options.words_of(INNER), default=list(INNER), help=",".join(INNER))
    arguments.add_argument("--model", type=options.words, default=options.words(MODELS), help=f"[default: {MODELS}]")
    arguments.add_argument("--peer", type=options.words_of(PEERS), default=list(PEERS), help=",".join(PEERS))
    arguments.add_argument(
        "--size", type=size_of, default=size_of("8x64"), metavar="BATCHxLENGTH", help="[default: 8x64]"
    )
    arguments.add_argument(
        "--wide", action="store_true", help="models of transformers of width 256 instead of 32, with heads of 64"
    )
    results.add_option(arguments)
    options.add_page(arguments)
    given = arguments.parse_args()
    os.environ["CKPT_OPT_BIN"] = str(given.ckpt_opt)
    torch.set_num_threads(1)
    known = {key(row): row for row in results.read(given.results)}
    rows: list[Row] = []
    for name in given.model:
        made = None
        for inner, peer in itertools.product(given.inner, given.peer):
            if inner == "inductor" and peer == CHECKPOINT:
                continue
            size = f"{given.size.batch}x{given.size.seq}{' wide' * given.wide}"
            row: Row = {"model": name, "inner": inner, "peer": peer, "size": size}
            if key(row) not in known:
                made = made or fitting(name, given.size, given.wide)
                try:
                    row |= compare(*made, inner, peer)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
                results.append(given.results, [row])
                print(f"{key(row)}: {wrong(row) or row.get('left_out') or 'good'}", file=sys.stderr, flush=True)
                known[key(row)] = row
            rows.append(known[key(row)])
    lines = table(rows)
    print("\n".join(lines))
    notes = [f"{key(row)}: {row['left_out']}" for row in rows if "left_out" in row]
    failures = [f"{key(row)}: {text}" for row in rows if (text := wrong(row))]
    width = f", width {shrink.TIMES * shrink.WIDTH}" if given.wide else ""
    head = page.head(f"PyTorch {torch.__version__}, batch {given.size.batch}, length {given.size.seq}{width}", 1)
    return page.finish("Peers in PyTorch", [head, "", *lines], notes, failures, given.page)


if __name__ == "__main__":
    sys.exit(main())
