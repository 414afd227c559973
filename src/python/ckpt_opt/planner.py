"""Asks the planner for a schedule of a cost graph, and says what it decided.

A cost graph is the form that `ckpt-opt plan` reads: ops in order with costs, operands and results; values with bytes.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_opt.binary import CommandError, call

last_plans: list[Plan] = []
"""One plan for each graph that was compiled in this process, the newest last."""

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{form}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for form, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


RUN, OFFLOAD, RELEASE, FETCH = "run", "offload", "release", "fetch"
MIN_OFFLOAD_BYTES = 8192
"""Results with fewer bytes stay on the device, among them the states of generators."""


SHOWN = 10
"""So many tensors at a peak are listed."""


class Step(NamedTuple):
    """One step of a schedule."""

    action: str
    op: int


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
    """Ops by name that run more than once, and how many times more; by inductor, also those that its kernels recompute for free."""
    offloaded: dict[str, int]
    """Ops by name whose results are offloaded, and the bytes of these."""
    decisions: dict[str, Any] = field(repr=False)
    """The plan, in the form that `ckpt-opt plan --plan-out` writes: `schedule` holds the ops of `graph` in the order in which
    they run; one that occurs again is recomputed. Where `offloaded` holds ops, `steps_of` reads both."""
    loss_chunks: int
    """So many chunks of tokens pass through head and loss one after the other."""
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

    @property
    def step_bytes(self) -> int:
        """Returns the peak of a step: that of the compiled code, where there is one."""
        return self.peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes

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
        moved = f", {mib(sum(self.offloaded.values()))} are offloaded" if self.offloaded else ""
        chunked = f", the loss is computed in {self.loss_chunks} chunks" if self.loss_chunks > 1 else ""
        bound = "" if self.lower_bound_pct is None else f", at least {self.lower_bound_pct:.1f} % at this budget"
        return (
            f"peak {mib(self.peak_bytes)} (unplanned {mib(self.unplanned_peak_bytes)}, of which "
            f"{mib(self.static_bytes)} are parameters and inputs){compiled}; overhead {self.overhead_pct:.1f} %{bound}; "
            f"{sum(self.recomputed.values())} ops are recomputed{moved}{chunked}"
        )


def mib(count: int) -> str:
    """Returns a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def static_bytes(graph: dict[str, Any]) -> int:
    """Returns the bytes of a cost graph that are there throughout."""
    return sum(value["bytes"] for value in graph["values"] if value["kind"] == "static")


def follow(graph: dict[str, Any], policy: str, offload: str = "none") -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans a cost graph by a policy instead of a budget; returns the plan and the planner's report.

    Raises:
        ValueError: The policy is unknown, or needs layers where none are known.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-opt-") as folder:
        source, out = Path(folder, "graph.json"), Path(folder, "plan.json")
        source.write_text(json.dumps(graph))
        try:
            report = call("plan", source, "--policy", policy, *offloading(offload), "--plan-out", out)
        except CommandError as error:
            raise ValueError(f"policy={policy!r}: {error}") from None
        return json.loads(out.read_text()), report


def solve(
    graph: dict[str, Any], budget: int | str, objective: str, effort: str, offload: str = "none", *, proves: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans a cost graph within a budget; returns the plan and the planner's report.

    Args:
        graph: The cost graph.
        budget: The largest peak in bytes, static bytes included, or a share as text.
        objective: `cost` or `flops`.
        effort: `first`, `normal` or `thorough`.
        offload: `none`, `auto` or `cpu`.
        proves: Whether to go on proving how good a plan is after the search for it.

    Raises:
        BudgetError: No plan fits.
    """
    static = static_bytes(graph)
    if isinstance(budget, int) and budget <= static:
        raise BudgetError(f"parameters, buffers and inputs alone take {mib(static)}; the budget is {mib(budget)}")
    # Budgets of a cost graph are on the peak above what is static.
    words = ["--budget", budget if isinstance(budget, str) else str(budget - static)]
    words += ["--objective", objective, "--effort", effort, "--no-smallest", *offloading(offload)]
    words += [] if proves else ["--no-proof"]
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
    tensors = answer.get("tensors", [])
    lines += [f"  at the peak: {tensor['name']}, {tensor['bytes']} bytes" for tensor in tensors[:SHOWN]]
    if more := tensors[SHOWN:]:
        lines.append(f"  at the peak: {sum(tensor['bytes'] for tensor in more)} bytes in {len(more)} more")
    return "\n".join([*lines, "help: a larger budget, or on_infeasible='smallest'"])


def offloading(word: str) -> list[str]:
    """Returns the options that let the command plan what to offload."""
    return [] if word == "none" else ["--offload", word, "--min-offload-bytes", str(MIN_OFFLOAD_BYTES)]


def steps_of(schedule: list[int], offloaded: Sequence[int] = ()) -> list[Step]:
    """Returns the steps of a schedule as files have it: the number of an op counts three for every offloaded op before it, which
    run, move and release it. The first move is out, later ones are back."""
    firsts = [op + 2 * before for before, op in enumerate(sorted(offloaded))]
    has_left: set[int] = set()
    steps = []
    for number in schedule:
        before = bisect_right(firsts, number)
        place = number - firsts[before - 1] if before else 0
        if not before or place > 2:
            steps.append(Step(RUN, number - 2 * before))
            continue
        op = firsts[before - 1] - 2 * (before - 1)
        steps.append(Step((RUN, FETCH if op in has_left else OFFLOAD, RELEASE)[place], op))
        if place == 1:
            has_left.add(op)
    return steps


def writes_over(graph: dict[str, Any], step: Step, freed: Sequence[int]) -> list[int]:
    """Returns the operands that a step writes its result over: those that may be, and that nothing reads after it."""
    may = graph["ops"][step.op].get("in_place_operands", []) if step.action == RUN else []
    return [value for value in may if value in freed]


def lifetimes(graph: dict[str, Any], steps: list[Step]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the values that each step allocates, and those that are freed after it.

    A value is allocated when its op runs or it is fetched, and freed after the last op that reads this copy of it, or that
    releases it. What nothing reads is not fetched.
    """
    ops = graph["ops"]
    last: dict[tuple[int, int], int] = {}
    made_at: dict[int, int] = {}
    for at, (action, op) in enumerate(steps):
        for value in ops[op]["ins" if action == RUN else "outs"] if action != FETCH else []:
            last[value, made_at.get(value, -1)] = at
        for value in ops[op]["outs"] if action in (RUN, FETCH) else []:
            made_at[value] = at
            last[value, at] = at
    for value in graph["outputs"]:
        last[value, made_at.get(value, -1)] = len(steps)
    made: list[list[int]] = [[] for _ in steps]
    freed: list[list[int]] = [[] for _ in range(len(steps) + 1)]
    for (value, born), at in last.items():
        if born == at and steps[at].action == FETCH:
            continue
        if born >= 0:
            made[born].append(value)
        freed[at].append(value)
    return made, freed


def peak_of(graph: dict[str, Any], schedule: list[int], offloaded: Sequence[int] = ()) -> int:
    """Returns the peak of a schedule in bytes, static bytes included."""
    ops, values = graph["ops"], graph["values"]
    steps = steps_of(schedule, offloaded)
    made, freed = lifetimes(graph, steps)
    live: int = sum(v["bytes"] for v in values if v["kind"] in ("static", "ph"))
    peak = live
    for at, step in enumerate(steps):
        over = writes_over(graph, step, freed[at])
        live += sum(values[value]["bytes"] for value in made[at]) - sum(values[value]["bytes"] for value in over)
        peak = max(peak, live + (ops[step.op].get("temp_bytes", 0) if step.action == RUN else 0))
        gone = [value for value in freed[at] if values[value]["kind"] != "static" and value not in over]
        live -= sum(values[value]["bytes"] for value in gone)
    return peak
