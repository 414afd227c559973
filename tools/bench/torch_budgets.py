"""Trains models of transformers and timm through the Python package, at many budgets, and measures the peak of each step.

    python tools torch-budgets --ckpt-opt BINARY [--inner aot_eager,inductor] [--model llama,…] [--budget smallest,50%,…]
        [--results FILE.jsonl] [--page FILE.md]

Each row is a small model, a way to compile it, and a budget. Its figures are bytes above parameters and inputs:

  predicted  the peak that is known before the first step
  measured   what PyTorch's profiler sees in the second step
  limit      what the budget allows

A budget is a share of the way from the smallest peak that was found for the model to that of the unplanned step.
A row fails if measured and predicted differ by more than 64 bytes, if the step takes more than the limit, or if a gradient
is not that of eager PyTorch: bit for bit with aot_eager, within 1e-4 of the largest with inductor. A budget that is refused
with a reason does not fail. Rows in the results file are not measured again.
PyTorch is needed (tools/requirements-torch.txt). Exit code 0 if no row fails, else 1.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.lib import options, page, results, shrink, zoo
from tools.lib.model_inputs import Maker, Sizes
from tools.lib.results import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/python"))

import ckpt_opt
from ckpt_opt.prices import allocated_bytes

MODELS = "llama,qwen3,mistral,gemma3_text,olmo,bert,roberta,vit,t5,whisper,mamba,timm/resnet,timm/convnext,timm/swin_transformer"
SMALLEST = "smallest"
BUDGETS = f"{SMALLEST},5%,15%,30%,45%,60%,80%,100%"
INNER = ("aot_eager", "inductor")
SIZES = Sizes(4, 32)
TOLERANCE_BYTES = 64


def loss_of(result: Any) -> torch.Tensor:
    """Returns a scalar that depends on every floating-point tensor in a result."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return torch.stack([t.pow(2).mean() for t in tensors if t.is_floating_point() and t.requires_grad]).sum()


def built(
    name: str, sizes: Sizes = SIZES, cuts: Sequence[str] = shrink.CUTS
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a small model and inputs that it runs with."""
    (architecture,) = [a for a in zoo.architectures(["transformers", "timm"]) if a.name == name]
    for model, _ in architecture.candidates(cuts):
        for inputs in Maker(model, sizes, architecture.group).candidates():
            try:
                loss_of(model(**inputs)).backward()
            except Exception:
                continue
            model.zero_grad(set_to_none=True)
            return model, inputs
    raise zoo.Unbuilt(f"{name}: no inputs fit")


def gradients(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    step().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measure(model: torch.nn.Module, inputs: dict[str, torch.Tensor], inner: str, budget_bytes: int | None) -> Row:
    """Trains two steps at a budget; without one, by the plan with the smallest peak."""
    expected = gradients(model, lambda: loss_of(model(**inputs)))
    torch._dynamo.reset()
    ckpt_opt.last_plans.clear()
    smallest = budget_bytes is None
    backend = ckpt_opt.backend(
        "1%" if budget_bytes is None else budget_bytes, inner=inner, on_infeasible="smallest" if smallest else "raise"
    )
    step = torch.compile(lambda **named: loss_of(model(**named)), backend=backend, fullgraph=True, dynamic=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = gradients(model, lambda: step(**inputs))
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            refused = isinstance(cause, ckpt_opt.BudgetError)
            return {"refused" if refused else "failed": f"{type(cause).__name__}: {cause}".split("\n")[0][:200]}
    model.zero_grad(set_to_none=True)
    gc.collect()
    measured, _ = allocated_bytes(lambda: step(**inputs).backward())
    (plan,) = ckpt_opt.last_plans
    predicted = plan.peak_bytes if plan.compiled_peak_bytes is None else plan.compiled_peak_bytes
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = (
        max(float((found[n] - g).abs().max()) for n, g in expected.items()) if found.keys() == expected.keys() else 1e9
    )
    return {
        "predicted": predicted - plan.static_bytes,
        "measured": measured,
        "limit": None if smallest or plan.limit_bytes is None else plan.limit_bytes - plan.static_bytes,
        "unplanned": plan.unplanned_peak_bytes - plan.static_bytes,
        "static": plan.static_bytes,
        "overhead_pct": plan.overhead_pct,
        "flops_overhead_pct": plan.flops_overhead_pct,
        "worst": worst / largest,
        "seconds": round(plan.seconds, 2),
        "unchecked": [str(w.message) for w in seen if "could not be computed" in str(w.message)],
    }


def wrong(row: Row) -> str:
    """Returns what is wrong with a row, if anything is."""
    if "refused" in row:
        return ""
    if "failed" in row:
        return str(row["failed"])
    found = []
    if row["unchecked"]:
        found.append(row["unchecked"][0])
    if abs(row["measured"] - row["predicted"]) > TOLERANCE_BYTES:
        found.append(f"measured {row['measured']} bytes, predicted {row['predicted']}")
    if row["limit"] is not None and row["measured"] > row["limit"] + TOLERANCE_BYTES:
        found.append(f"measured {row['measured']} bytes, allowed {row['limit']}")
    if row["worst"] > (0 if row["inner"] == "aot_eager" else 1e-4):
        found.append(f"a gradient differs by {row['worst']:.1e} of the largest")
    return "; ".join(found)


def rows(models: list[str], inners: list[str], budgets: list[str], known: dict[str, Row]) -> Iterator[Row]:
    """Yields the rows that are not known yet. The caller adds each to `known`."""
    for name in models:
        made: tuple[torch.nn.Module, dict[str, torch.Tensor]] | None = None
        for inner in inners:
            for budget in budgets:
                if key(row := {"model": name, "inner": inner, "budget": budget}) in known:
                    continue
                made = made or built(name)
                if budget == SMALLEST:
                    yield row | measure(*made, inner, None)
                    continue
                least = known.get(key(row | {"budget": SMALLEST}), {})
                if "measured" not in least:
                    yield row | {"failed": "the smallest peak is not known"}
                    continue
                way = max(0, least["unplanned"] - least["predicted"])
                above = least["predicted"] + round(float(budget.rstrip("%")) / 100 * way)
                yield row | measure(*made, inner, least["static"] + above)


def key(row: Row) -> str:
    return f"{row['model']} {row['inner']} {row['budget']}"


def table(measured: list[Row]) -> list[str]:
    """Returns a line for each model and way to compile it."""
    lines = [
        "| model | compiled by | budgets met | refused | largest difference, bytes | smallest peak, % of unplanned | FLOPs there, % |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, inner in dict.fromkeys((row["model"], row["inner"]) for row in measured):
        own = [row for row in measured if (row["model"], row["inner"]) == (name, inner)]
        ran = [row for row in own if "measured" in row]
        least = min(ran, key=lambda row: row["measured"], default=None)
        difference = max((abs(row["measured"] - row["predicted"]) for row in ran), default=0)
        share = f"{100 * least['measured'] / least['unplanned']:.0f}" if least else ""
        flops = f"+{least['flops_overhead_pct']:.1f}" if least else ""
        met = sum(not wrong(row) for row in ran)
        lines.append(
            f"| {name} | {inner} | {met} of {len(own)} | {len(own) - len(ran)} | {difference} | {share} | {flops} |"
        )
    return lines


def main() -> int:
    arguments = options.with_binary(__doc__)
    arguments.add_argument("--inner", type=options.words_of(INNER), default=list(INNER), help=",".join(INNER))
    arguments.add_argument("--model", type=options.words, default=options.words(MODELS), help=f"[default: {MODELS}]")
    arguments.add_argument("--budget", type=options.words, default=options.words(BUDGETS), help=f"[default: {BUDGETS}]")
    results.add_option(arguments)
    options.add_page(arguments)
    given = arguments.parse_args()
    os.environ["CKPT_OPT_BIN"] = str(given.ckpt_opt)
    torch.set_num_threads(1)
    known = {key(row): row for row in results.read(given.results)}
    for row in rows(given.model, given.inner, given.budget, known):
        known[key(row)] = row
        print(f"{key(row)}: {wrong(row) or row.get('refused') or 'good'}", file=sys.stderr, flush=True)
        results.append(given.results, [row])
    measured = [
        known[k] for m in given.model for i in given.inner for b in given.budget if (k := f"{m} {i} {b}") in known
    ]
    lines = table(measured)
    print("\n".join(lines))
    notes = [f"{key(row)}: {row['refused']}" for row in measured if "refused" in row]
    failures = [f"{key(row)}: {text}" for row in measured if (text := wrong(row))]
    head = page.head(f"PyTorch {torch.__version__}", 1)
    return page.finish("Budgets in PyTorch", [head, "", *lines], notes, failures, given.page)


if __name__ == "__main__":
    sys.exit(main())
