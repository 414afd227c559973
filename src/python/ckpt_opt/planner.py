"""Asks the planner for a schedule of a cost graph, and says what it decided.

A cost graph is the form that `ckpt-opt plan` reads: ops in order with costs, operands and results; values with bytes.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_opt.binary import CommandError, call

last_plans: list[Plan] = []
"""One plan for each graph that was compiled in this process, the newest last."""

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{form}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for form, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


class BudgetError(RuntimeError):
    """No plan fits into the budget.

    `smallest_bytes` is the smallest budget that one fits into, where it is known.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class PlanWarning(UserWarning):
    """A model trains, but not as planned: nothing was planned, or less than was asked for."""


def bytes_of(budget: int | str) -> int | str:
    """Returns a budget in bytes, or a share of the unplanned peak such as `60%`, or `auto`, as text."""
    text = str(budget).strip()
    if isinstance(budget, str) and (text == "auto" or re.fullmatch(r"\d+(\.\d+)?%", text)):
        return text
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if not isinstance(budget, (int, str)) or not parts or parts[2].lower() not in units:
        raise ValueError(f"budget: expected bytes, such as 6000000000, '6GiB', '750MB' or '60%', found {budget!r}")
    if not parts[2] and float(parts[1]) < 1000:
        raise ValueError(f"budget: {text} bytes are too few for a model; did you mean '{text}%' or '{text}GiB'?")
    return int(float(parts[1]) * units[parts[2].lower()])


@dataclass
class Plan:
    """What was decided for one graph. Sizes are in bytes.

    Peaks include what is there throughout the step: parameters, buffers and inputs (`static_bytes`). They do not include
    the states of an optimizer.
    """

    peak_bytes: int
    unplanned_peak_bytes: int
    static_bytes: int
    saved_bytes: int
    """Activations that the forward pass hands to the backward pass."""
    overhead_pct: float
    """The cost of recomputation, in percent of the unplanned step's cost."""
    flops_overhead_pct: float
    lower_bound_pct: float | None
    """No plan within this budget has a smaller overhead; `None` for a plan by a policy."""
    kept_calls: dict[str, tuple[int, int]] = field(repr=False)
    """Calls in the forward pass whose results are kept, and all calls, by op and shapes of operands."""
    recomputed: dict[str, int]
    """Ops by name that run more than once, and how many times more."""
    decisions: dict[str, Any] = field(repr=False)
    """The plan, in the form that `ckpt-opt plan --plan-out` writes: `schedule` holds the ops of `graph` in the order in which
    they run; one that occurs again is recomputed."""
    forward_steps: int
    """So many steps of the schedule belong to the forward pass."""
    forward_outputs: int
    """So many results of the forward pass are the model's."""
    saved_tensors: int
    """So many tensors the forward pass returns after them, for the backward pass."""
    gradient_bytes: int
    """What the backward pass returns."""
    limit_bytes: int | None
    """What the budget allows this graph; `None` for a budget of `auto`."""
    held_bytes: int
    """What the budget has lost to other graphs of the model that are alive at the same time."""
    is_smallest: bool
    """The limit could not be met, and this is the plan with the smallest peak."""
    seconds: float
    graph: dict[str, Any] = field(repr=False)
    """The cost graph, in the form that `ckpt-opt plan` reads."""
    report: dict[str, Any] = field(repr=False)
    """What `ckpt-opt plan --format json` prints."""
    compiled_peak_bytes: int | None = None
    """The peak of the code that inductor made of the plan; `None` without inductor."""

    def save(self, path: str | Path) -> None:
        """Writes the cost graph; `ckpt-opt plan PATH` and `ckpt-opt frontier PATH` read it."""
        Path(path).write_text(json.dumps(self.graph))

    def html(self, path: str | Path) -> None:
        """Writes a page that shows memory over the step, and what is recomputed. The name ends in `.html`."""
        with tempfile.TemporaryDirectory(prefix="ckpt-opt-") as folder:
            source, plan = Path(folder, "graph.json"), Path(folder, "plan.json")
            self.save(source)
            plan.write_text(json.dumps(self.decisions))
            call("plan", source, "--plan-in", plan, "--report", Path(path))

    def __str__(self) -> str:
        compiled = (
            "" if self.compiled_peak_bytes is None else f"; {mib(self.compiled_peak_bytes)} as compiled by inductor"
        )
        bound = "" if self.lower_bound_pct is None else f", at least {self.lower_bound_pct:.1f} % at this budget"
        return (
            f"peak {mib(self.peak_bytes)} (unplanned {mib(self.unplanned_peak_bytes)}, of which "
            f"{mib(self.static_bytes)} are parameters and inputs){compiled}; overhead {self.overhead_pct:.1f} %{bound}; "
            f"{sum(self.recomputed.values())} ops are recomputed"
        )


def mib(count: int) -> str:
    """Returns a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def static_bytes(graph: dict[str, Any]) -> int:
    """Returns the bytes of a cost graph that are there throughout."""
    return sum(value["bytes"] for value in graph["values"] if value["kind"] == "static")


def follow(graph: dict[str, Any], policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans a cost graph by a policy instead of a budget; returns the plan and the planner's report.

    Raises:
        ValueError: The policy is unknown, or needs layers where none are known.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-opt-") as folder:
        source, out = Path(folder, "graph.json"), Path(folder, "plan.json")
        source.write_text(json.dumps(graph))
        try:
            report = call("plan", source, "--policy", policy, "--plan-out", out)
        except CommandError as error:
            raise ValueError(f"policy={policy!r}: {error}") from None
        return json.loads(out.read_text()), report


def solve(
    graph: dict[str, Any], budget: int | str, objective: str, effort: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans a cost graph within a budget; returns the plan and the planner's report.

    Args:
        graph: The cost graph.
        budget: The largest peak in bytes, static bytes included, or a share as text.
        objective: `cost` or `flops`.
        effort: `first`, `normal` or `thorough`.

    Raises:
        BudgetError: No plan fits.
    """
    static = static_bytes(graph)
    if isinstance(budget, int) and budget <= static:
        raise BudgetError(f"parameters, buffers and inputs alone take {mib(static)}; the budget is {mib(budget)}")
    # Budgets of a cost graph are on the peak above what is static.
    words = ["--budget", budget if isinstance(budget, str) else str(budget - static)]
    words += ["--objective", objective, "--effort", effort, "--no-smallest"]
    with tempfile.TemporaryDirectory(prefix="ckpt-opt-") as folder:
        source, out = Path(folder, "graph.json"), Path(folder, "plan.json")
        source.write_text(json.dumps(graph))
        try:
            report = call("plan", source, *words, "--plan-out", out)
        except CommandError as error:
            if error.answer["error"] != "budget":
                raise
            smallest = error.answer.get("smallest_feasible_bytes")
            smallest = None if smallest is None else int(smallest) + static
            raise BudgetError(refusal(budget, smallest, static, error.answer), smallest) from None
        return json.loads(out.read_text()), report


def refusal(budget: int | str, smallest: int | None, static: int, answer: dict[str, Any]) -> str:
    """Returns the message of a budget that no plan fits into."""
    said = mib(budget) if isinstance(budget, int) else budget
    lines = [f"no plan fits into the budget of {said}"]
    if smallest is not None:
        lines.append(f"the smallest possible peak is {smallest} bytes ({mib(smallest)}, {mib(static)} of them static)")
    lines += [f"  at the peak: {tensor['name']}, {tensor['bytes']} bytes" for tensor in answer.get("tensors", [])]
    return "\n".join([*lines, "help: a larger budget, or on_infeasible='smallest'"])


def peak_of(graph: dict[str, Any], schedule: list[int]) -> int:
    """Returns the peak of a schedule in bytes, static bytes included.

    A value is allocated when its op runs, and freed after the last op that reads this computation of it.
    """
    ops, values, outputs = graph["ops"], graph["values"], set(graph["outputs"])
    last: dict[tuple[int, int], int] = {}
    made_at: dict[int, int] = {}
    for at, op in enumerate(schedule):
        for value in ops[op]["ins"]:
            last[value, made_at.get(value, -1)] = at
        for value in ops[op]["outs"]:
            made_at[value] = at
            last[value, at] = at
    for value in outputs:
        last[value, made_at.get(value, -1)] = len(schedule)
    freed: list[list[int]] = [[] for _ in range(len(schedule) + 1)]
    for (value, _), at in last.items():
        freed[at].append(value)
    live = peak = sum(v["bytes"] for v in values if v["kind"] == "static" or (v["kind"] == "ph"))
    for at, op in enumerate(schedule):
        live += sum(values[value]["bytes"] for value in ops[op]["outs"])
        peak = max(peak, live + ops[op].get("temp_bytes", 0))
        live -= sum(values[value]["bytes"] for value in freed[at] if values[value]["kind"] != "static")
    return peak
