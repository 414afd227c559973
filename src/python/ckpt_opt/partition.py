"""Splits a joint graph into forward and backward pass as the planner decides.

PyTorch's own partitioner chooses what the forward pass saves, and leaves the order of the backward pass to a rule. This one
writes both passes in the plan's order, in which a value may be computed several times, and anywhere.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import SymBool, SymFloat, SymInt, fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners as aot
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)

from ckpt_opt.binary import executable
from ckpt_opt.joint import Joint, is_mutable, keep_states
from ckpt_opt.planner import BudgetError, Plan, PlanWarning, bytes_of, last_plans, mib, peak_of, solve, static_bytes
from ckpt_opt.prices import Prices
from ckpt_opt.writer import Writer

OBJECTIVES = ("cost", "flops")
EFFORTS = ("first", "normal", "thorough")
ON_INFEASIBLE = ("raise", "smallest")


@dataclass
class Options:
    """What a plan is asked for; `backend` describes each."""

    budget: int | str
    objective: str = "cost"
    effort: str = "normal"
    measure: bool = False
    fused: bool = False
    on_infeasible: str = "raise"

    def __post_init__(self) -> None:
        self.budget = bytes_of(self.budget)
        for name, value, known in (
            ("objective", self.objective, OBJECTIVES),
            ("effort", self.effort, EFFORTS),
            ("on_infeasible", self.on_infeasible, ON_INFEASIBLE),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, found {value!r}")


@dataclass
class Partitioner:
    """A `partition_fn` for AOTAutograd: takes a joint graph, returns forward and backward pass.

    One partitioner may see several graphs, where a model breaks into several. They share its budget: while one of them
    runs, what the others saved is alive.
    """

    options: Options
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prices = Prices(self.options.measure, self.options.fused)

    def key(self) -> str:
        """Returns a text that differs wherever plans may differ: for caches of compiled code."""
        code = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            code.update(path.read_bytes())
        command = executable().stat()
        before = [plan.saved_bytes for plan in self.plans]
        return repr((self.options, before, command.st_mtime_ns, command.st_size, code.hexdigest()))

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Any = None, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns the modules of the two passes. Other arguments are those of PyTorch's partitioners, and have no use here."""
        start = time.monotonic()
        module.graph.eliminate_dead_code(is_impure_node=has_effect)
        if functorch_config.cse:
            module.graph = aot.fx_graph_cse(module.graph)
        keep_states(module)
        module.recompile()
        joint = Joint(module, num_fwd_outputs)
        graph = joint.cost_graph(self._prices)
        decisions, report = self._solve(graph)
        schedule = decisions["schedule"]
        runs = Counter(schedule)
        repeated = {joint.ops[op].node for op, count in runs.items() if count > 1}
        # A draw that runs once needs no copy of the generator's state.
        unread = {joint.state(op.node) for op in joint.ops if op.takes_state and op.node not in repeated}
        written = graph | {"values": [v | {"bytes": 0} if i in unread else v for i, v in enumerate(graph["values"])]}
        # The forward pass ends after the last op of it that runs for the first time.
        first = {op: at for at, op in reversed(list(enumerate(schedule)))}
        end = max((first[op] for op in range(joint.boundary)), default=-1) + 1
        split = Split(module, joint, repeated, num_fwd_outputs)
        forward, backward, saved = split.write(schedule[:end], schedule[end:])
        plan = Plan(
            peak_bytes=peak_of(written, schedule),
            unplanned_peak_bytes=peak_of(written, list(range(len(joint.ops)))),
            static_bytes=static_bytes(graph),
            saved_bytes=sum(joint.sizes[storage] for storage in saved),
            overhead_pct=report["overhead_pct"],
            flops_overhead_pct=report["flops_overhead_pct"],
            lower_bound_pct=report["lower_bound_pct"],
            recomputed={joint.ops[op].node.name: count - 1 for op, count in runs.items() if count > 1},
            decisions=decisions,
            forward_steps=end,
            seconds=time.monotonic() - start,
            graph=graph,
            report=report,
        )
        self.plans.append(plan)
        last_plans.append(plan)
        return forward, backward

    def _solve(self, graph: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plans a graph within what is left of the budget."""
        budget = self.options.budget
        if isinstance(budget, int) and self.plans:
            budget = self._rest(budget, graph)
        try:
            return solve(graph, budget, self.options.objective, self.options.effort)
        except BudgetError as error:
            if self.options.on_infeasible != "smallest" or error.smallest_bytes is None:
                raise
            lines = str(error).splitlines()[:2]
            warnings.warn(f"{'; '.join(lines)}: planned for that", PlanWarning, stacklevel=3)
            return solve(graph, error.smallest_bytes, self.options.objective, self.options.effort)

    def _rest(self, budget: int, graph: dict[str, Any]) -> int:
        """Returns what other graphs of the same model leave of a budget to this one.

        Raises:
            BudgetError: Earlier graphs have no room for what this one holds: their plans are made already.
        """
        held = sum(plan.saved_bytes + plan.static_bytes for plan in self.plans)
        if budget - held <= 0:
            raise BudgetError(
                f"the model breaks into several graphs, and those before this one hold {mib(held)} of the budget of "
                f"{mib(budget)}\nhelp: torch.compile(model, fullgraph=True) shows what breaks it; a share such as '60%' "
                "applies to each graph"
            )
        return budget - held


def has_effect(node: fx.Node) -> bool:
    """Returns true if a node stays though nothing reads it."""
    return node.op in ("placeholder", "output") or is_mutable(node)


class Split:
    """Writes the two passes of a joint graph in the order of a plan."""

    def __init__(self, module: fx.GraphModule, joint: Joint, repeated: set[fx.Node], forward_outputs: int) -> None:
        self._module = module
        self._joint = joint
        self._repeated = repeated
        self._forward_outputs = forward_outputs

    def write(self, first: list[int], second: list[int]) -> tuple[fx.GraphModule, fx.GraphModule, list[int]]:
        """Returns forward and backward pass, and the storages that the one saves for the other, without static ones."""
        joint = self._joint
        handed = self._handed_over(second)
        saved = [joint.holder[s] for s in handed if joint.kinds[s] != "ph" and joint.holder[s].op != "get_attr"]
        sizes = [node for node in joint.nodes if self._is_size(node)]
        # PyTorch drops the sizes that the backward pass does not need, adds the symbols that it does, and says the
        # descriptions of results.
        aot._extract_fwd_bwd_modules(self._module, list(saved), sizes, num_fwd_outputs=self._forward_outputs)
        described = aot._extract_fwd_bwd_outputs(self._module, num_fwd_outputs=self._forward_outputs)
        # Tensors that may change in place after they were saved come last.
        saved.sort(key=is_unchecked)
        marks = [
            SavedForBackwardsNoVcCheckAOTOutput(i)
            if i < len(saved) and is_unchecked(node)
            else SavedForBackwardsAOTOutput(i)
            for i, node in enumerate([*saved, *sizes])
        ]
        inputs = [node for node in joint.nodes if node.op == "placeholder"]
        writer = Writer(joint, self._repeated)
        for node in inputs:
            if aot._is_primal(node) or aot._is_fwd_seed_offset(node):
                writer.take(node)
        for op in first:
            writer.run(joint.ops[op])
        forward = writer.finish([*joint.forward_results, *saved, *sizes], [*described[2], *marks])
        writer = Writer(joint, self._repeated)
        tangents = [node for node in inputs if aot._is_tangent(node)]
        others = [node for node in inputs if aot._is_bwd_seed_offset(node) or aot._is_backward_state(node)]
        for node in [*sizes, *saved, *tangents, *others]:
            writer.take(node)
        for op in second:
            writer.run(joint.ops[op])
        backward = writer.finish(list(joint.backward_results), list(described[3]))
        make = fx._lazy_graph_module._make_graph_module
        return make(self._module, forward), make(self._module, backward), [s for s in handed if joint.kinds[s] == "act"]

    def _handed_over(self, second: list[int]) -> list[int]:
        """Returns the storages that the backward pass reads before it computes them."""
        joint = self._joint
        made: set[int] = set()
        found: dict[int, None] = {}
        for at in second:
            op = joint.ops[at]
            reads = joint.reads(op)
            if op.draws and op.node not in self._repeated:
                reads = [s for s in reads if s != joint.state(op.node)]
            found |= dict.fromkeys(s for s in reads if s not in made)
            made.update(joint.makes(op))
        for node in joint.backward_results:
            if isinstance(node, fx.Node):
                found |= dict.fromkeys(s for s in joint.storages(node) if s not in made)
        return list(found)

    def _is_size(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            node.op != "output"
            and isinstance(value, (SymInt, SymFloat, SymBool))
            and not aot._is_tangent(node)
            and not aot._has_tag_is_backward(node)
        )


def is_unchecked(node: fx.Node) -> bool:
    """Returns true for a tensor that PyTorch saves without a check for changes in place."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))
