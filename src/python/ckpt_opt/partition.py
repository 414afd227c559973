"""Splits a joint graph into forward and backward pass as the planner decides.

PyTorch's own partitioner chooses what the forward pass saves, and leaves the order of the backward pass to a rule. This one
writes both passes in the plan's order, in which a value may be computed several times, and anywhere.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import SymBool, SymFloat, SymInt, fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners as aot
from torch._functorch._aot_autograd import descriptors

from ckpt_opt.binary import executable
from ckpt_opt.fusion import Targets, free_nodes, leave_to_plan
from ckpt_opt.joint import Joint, is_mutable, keep_states
from ckpt_opt.planner import (
    FETCH,
    OFFLOAD,
    RELEASE,
    RUN,
    BudgetError,
    Plan,
    PlanWarning,
    Step,
    bytes_of,
    follow,
    last_plans,
    lifetimes,
    mib,
    peak_of,
    solve,
    static_bytes,
    steps_of,
    writes_over,
)
from ckpt_opt.prices import Prices
from ckpt_opt.rows import Refused
from ckpt_opt.running import Running, need
from ckpt_opt.tile import tile_loss
from ckpt_opt.writer import Writer

OBJECTIVES = ("cost", "flops")
EFFORTS = ("first", "normal", "thorough")
ON_INFEASIBLE = ("raise", "smallest")
OFFLOADING = ("none", "auto", "cpu")


@dataclass
class Options:
    """What a plan is asked for; `backend` describes each."""

    budget: int | str | None
    policy: str | None = None
    objective: str = "cost"
    effort: str = "normal"
    measure: bool = False
    fused: bool = False
    on_infeasible: str = "raise"
    reserve: int | str = 0
    offload: str = "none"
    tile_loss: int | str | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.policy is None):
            raise ValueError("expected either a budget or a policy")
        self.budget = "auto" if self.budget is None else bytes_of(self.budget)
        self.reserve = bytes_of(self.reserve) if self.reserve != 0 else 0
        if self.reserve != 0 and not (isinstance(self.reserve, int) and isinstance(self.budget, int)):
            raise ValueError("reserve: expected bytes, of a budget in bytes")
        tiles = self.tile_loss
        if (
            tiles is not None
            and tiles != "auto"
            and (not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1)
        ):
            raise ValueError(f"tile_loss: expected a number of chunks or 'auto', found {tiles!r}")
        for name, value, known in (
            ("objective", self.objective, OBJECTIVES),
            ("effort", self.effort, EFFORTS),
            ("on_infeasible", self.on_infeasible, ON_INFEASIBLE),
            ("offload", self.offload, OFFLOADING),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
        if self.offload == "auto" and (self.policy is not None or self.objective != "cost"):
            raise ValueError("offload='auto' weighs the time of transfers: expected a budget and objective='cost'")


@dataclass
class Solved:
    """A plan as the planner gives it, and what it was asked for. Sizes are in bytes, those of `Plan`."""

    decisions: dict[str, Any]
    report: dict[str, Any]
    limit_bytes: int | None
    held_bytes: int
    is_smallest: bool


class Repeated(Exception):
    """A plan is one that was compiled before; `steps` says which."""

    def __init__(self, steps: str) -> None:
        super().__init__()
        self.steps = steps


def steps_in(decisions: dict[str, Any]) -> str:
    """Returns what runs and moves in a plan, as text."""
    return json.dumps([decisions["schedule"], decisions.get("offloaded", [])])


class Partitioner:
    """A `partition_fn` for AOTAutograd: takes a joint graph, returns forward and backward pass.

    One partitioner may see several graphs, where a model breaks into several. They share its budget: while one of them
    runs, what the others saved is alive.

    Attributes:
        plans: One for each graph.
        running: Forward passes whose backward pass has not run, where it is told of them.
        targets: The peaks that the last graph can be planned for, if it is compiled for a limit.
        place: The place of the target that it was planned for.
    """

    targets: Targets
    place: int

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plans: list[Plan] = []
        self.prices = Prices(options.measure, options.fused)
        self.running = Running(self._check)
        self._aim: int | None = None
        self._compiled: Iterable[str] = ()
        self._free: set[str] = set()

    @contextmanager
    def aim(self, place: int | None, compiled: Iterable[str]) -> Iterator[None]:
        """Plans the last graph again, for the target at a place; a new graph without one, for the largest within the budget.

        Raises:
            Repeated: The plan is one of those that were compiled already.
        """
        self._aim, self._compiled = place, compiled
        try:
            yield
        finally:
            self._aim, self._compiled = None, ()

    def key(self) -> str:
        """Returns a text that differs wherever plans may differ: for caches of compiled code."""
        code = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            code.update(path.read_bytes())
        command = executable().stat()
        before = [plan.saved_bytes for plan in self.running.plans()]
        return repr((self.options, before, self._aim, command.st_mtime_ns, command.st_size, code.hexdigest()))

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Any = None, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns the modules of the two passes. Other arguments are those of PyTorch's partitioners, and have no use here."""
        start = time.monotonic()
        module.graph.eliminate_dead_code(is_impure_node=has_effect)
        if functorch_config.cse:
            module.graph = aot.fx_graph_cse(module.graph)
        chunks = self._tile(module)
        fused = self.options.fused
        if self._aim is None and fused and self.options.policy is None:
            self._free = free_nodes(module, num_fwd_outputs)
        keep_states(module)
        module.recompile()
        joint = Joint(module, num_fwd_outputs)
        # A compiler decides itself what it writes over.
        graph = joint.cost_graph(self.prices, in_place=not fused, free=self._free)
        if self.options.offload != "none":
            graph["transfer"] = self.prices.transfer()
        solved = self._solve(graph, joint.gradient_bytes())
        if steps_in(solved.decisions) in self._compiled:
            raise Repeated(steps_in(solved.decisions))
        schedule, moved = solved.decisions["schedule"], solved.decisions.get("offloaded", [])
        steps = steps_of(schedule, moved)
        runs = Counter(step.op for step in steps if step.action == RUN)
        repeated = {joint.ops[op].node for op, count in runs.items() if count > 1}
        # A draw that runs once needs no copy of the generator's state.
        unread = {joint.state(op.node) for op in joint.ops if op.takes_state and op.node not in repeated}
        written = graph | {"values": [v | {"bytes": 0} if i in unread else v for i, v in enumerate(graph["values"])]}
        # The forward pass ends after the last op of it that runs for the first time.
        first = {step: at for at, step in reversed(list(enumerate(steps)))}
        end = max((first[Step(RUN, op)] for op in range(joint.boundary)), default=-1) + 1
        while end < len(steps) and steps[end].action in (OFFLOAD, RELEASE):
            end += 1
        split = Split(module, joint, repeated, num_fwd_outputs)
        made, freed = lifetimes(graph, steps)
        timeline = [(step, made[at], bool(writes_over(graph, step, freed[at]))) for at, step in enumerate(steps)]
        forward, backward, saved = split.write(timeline[:end], timeline[end:])
        plan = Plan(
            peak_bytes=peak_of(written, schedule, moved),
            unplanned_peak_bytes=peak_of(written, list(range(len(joint.ops)))),
            static_bytes=static_bytes(graph),
            saved_bytes=sum(joint.sizes[s] for s in saved.storages),
            overhead_pct=solved.report["overhead_pct"],
            flops_overhead_pct=solved.report["flops_overhead_pct"],
            lower_bound_pct=solved.report.get("lower_bound_pct"),
            kept_calls=joint.kept_calls(set(saved.storages)),
            recomputed={joint.ops[op].node.name: count - 1 for op, count in runs.items() if count > 1},
            offloaded={
                joint.ops[op].node.name: sum(joint.sizes[s] for s in joint.makes(joint.ops[op])) for op in moved
            },
            decisions=solved.decisions,
            loss_chunks=chunks,
            forward_steps=end,
            forward_outputs=num_fwd_outputs,
            saved_tensors=saved.tensors,
            gradient_bytes=joint.gradient_bytes(),
            limit_bytes=solved.limit_bytes,
            held_bytes=solved.held_bytes,
            is_smallest=solved.is_smallest,
            seconds=time.monotonic() - start,
            graph=graph,
            report=solved.report,
        )
        self.plans.append(plan)
        last_plans.append(plan)
        return forward, backward

    def _tile(self, module: fx.GraphModule) -> int:
        """Lets the loss be computed in chunks, if that is asked for; returns their number."""
        if self.options.tile_loss is None:
            return 1
        try:
            chunks = tile_loss(module, self.options.tile_loss)
        except Refused as reason:
            warnings.warn(f"the loss is not computed in chunks: {reason}", PlanWarning, stacklevel=3)
            return 1
        module.graph.eliminate_dead_code(is_impure_node=has_effect)
        return chunks

    def _plan(self, graph: dict[str, Any], budget: int | str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plans a graph within a budget, by the options."""
        options = self.options
        proves = options.effort == "thorough"
        return solve(graph, budget, options.objective, options.effort, options.offload, proves=proves)

    def _solve(self, graph: dict[str, Any], gradient_bytes: int) -> Solved:
        """Plans a graph within what is left of the budget."""
        budget, held = self.options.budget, 0
        assert budget is not None
        if self.options.policy is not None:
            return Solved(*follow(graph, self.options.policy, self.options.offload), None, 0, is_smallest=False)
        if isinstance(budget, int):
            held = self._held(budget, static_bytes(graph) + gradient_bytes)
            limit: int | None = budget - held
        else:
            limit = limit_of(budget, graph)
        if limit is not None and self.options.fused:
            found = self._aimed(graph, limit)
            if found is not None:
                return Solved(*found[:2], limit, held, is_smallest=found[2])
        ask = budget if isinstance(budget, str) or limit is None else limit
        try:
            return Solved(*self._plan(graph, ask), limit, held, is_smallest=False)
        except BudgetError as error:
            if error.smallest_bytes is None or self.options.on_infeasible != "smallest":
                if self.running.plans() and isinstance(self.options.reserve, int):
                    missing = 0 if error.smallest_bytes is None or limit is None else error.smallest_bytes - limit
                    raise BudgetError(
                        f"{error}, or reserve={self.options.reserve + missing} and more, so that graphs before this one, "
                        f"which hold {mib(held)}, leave more to it",
                        error.smallest_bytes and error.smallest_bytes + held,
                    ) from None
                raise
            lines = str(error).splitlines()[:2]
            warnings.warn(f"{'; '.join(lines)}: planned for that", PlanWarning, stacklevel=3)
            return Solved(*self._plan(graph, error.smallest_bytes), limit, held, is_smallest=True)

    def _aimed(self, graph: dict[str, Any], limit: int) -> tuple[dict[str, Any], dict[str, Any], bool] | None:
        """Plans for the target that is asked for; returns the plan, the report, and whether no plan has a smaller peak.

        Returns `None` where no plan is within the limit.
        """
        if self._aim is None:
            unlimited, _ = self._plan(graph, 2 * peak_of(graph, list(range(len(graph["ops"])))))
            first = peak_of(graph, unlimited["schedule"], unlimited.get("offloaded", []))
            self.targets = Targets(first, static_bytes(graph))
        self.place = self.targets.within(limit) if self._aim is None else self._aim
        try:
            return *self._plan(graph, self.targets[self.place]), False
        except BudgetError:
            leave_to_plan(graph, self._free)
        try:
            return *self._plan(graph, self.targets[self.place]), False
        except BudgetError as error:
            if error.smallest_bytes is None or error.smallest_bytes > limit:
                return None
            return *self._plan(graph, error.smallest_bytes), True

    def _held(self, budget: int, own: int) -> int:
        """Returns what of a budget is taken by others than this graph: the reserve, and graphs that wait for their backward pass.

        Args:
            budget: The budget in bytes.
            own: The parameters, inputs and gradients of this graph.

        Raises:
            BudgetError: The plans of graphs before this one, which are made already, leave no room for it.
        """
        assert isinstance(self.options.reserve, int)
        before = self.running.plans()
        reserve = self.options.reserve
        after_the_first = own + sum(plan.static_bytes + plan.gradient_bytes for plan in before[1:])
        if before:
            # The first graph left the reserve for those after it.
            reserve = max(0, reserve - after_the_first)
        held = reserve + sum(plan.saved_bytes + plan.static_bytes for plan in before)
        advice = (
            "help: torch.compile(model, fullgraph=True) shows what breaks the model; a share such as '60%' applies to each "
            "graph"
        )
        if budget <= held:
            raise BudgetError(
                f"the model breaks into several graphs; {mib(held)} of the budget of {mib(budget)} are reserved or held by "
                f"those before this one\n{advice}"
            )
        reached = need(before) + own + reserve if before else 0
        if reached > budget and self.options.on_infeasible != "smallest":
            raise BudgetError(
                f"the model breaks into several graphs: while the backward passes of those before this one run, parameters and "
                f"gradients of this one take {own} bytes more, {mib(reached)} in all; the budget is {mib(budget)}\n"
                f"help: reserve={max(after_the_first, self.options.reserve + reached - budget)} leaves room for them; {advice[6:]}"
            )
        return held

    def _check(self, plans: list[Plan]) -> None:
        """Compares what several calls take together with the budget."""
        budget = self.options.budget
        if not isinstance(budget, int):
            return
        taken = need(plans)
        if taken <= budget:
            return
        message = (
            f"{len(plans)} calls of compiled graphs wait for their backward pass, as where several layers call one graph; "
            f"together they take {mib(taken)} of a budget of {mib(budget)}"
        )
        if self.options.on_infeasible != "smallest":
            raise BudgetError(
                f"{message}\nhelp: torch.compile(model, fullgraph=True) shows what breaks the model", taken
            )
        warnings.warn(message, PlanWarning, stacklevel=3)


def limit_of(share: str, graph: dict[str, Any]) -> int | None:
    """Returns the bytes of a share of the unplanned peak, static bytes included; nothing for `auto`."""
    if share == "auto":
        return None
    static = static_bytes(graph)
    above = peak_of(graph, list(range(len(graph["ops"])))) - static
    return static + int(above * float(share[:-1]) / 100)


def has_effect(node: fx.Node) -> bool:
    """Returns true if a node stays though nothing reads it."""
    return node.op in ("placeholder", "output") or is_mutable(node)


Timeline = list[tuple[Step, list[int], bool]]
"""Steps, the storages that each allocates, and whether it writes its result over an operand."""


@dataclass
class Saved:
    """What the forward pass saves: so many tensors, and of their storages those that are not there throughout."""

    tensors: int
    storages: list[int]


class Split:
    """Writes the two passes of a joint graph in the order of a plan."""

    def __init__(self, module: fx.GraphModule, joint: Joint, repeated: set[fx.Node], forward_outputs: int) -> None:
        self._module = module
        self._joint = joint
        self._repeated = repeated
        self._forward_outputs = forward_outputs

    def write(self, first: Timeline, second: Timeline) -> tuple[fx.GraphModule, fx.GraphModule, Saved]:
        """Returns forward and backward pass, and what the one saves for the other."""
        joint = self._joint
        handed, hosts = self._handed_over(second)
        saved = [joint.holder[s] for s in handed if joint.kinds[s] != "ph" and joint.holder[s].op != "get_attr"]
        sizes = [node for node in joint.nodes if self._is_size(node)]
        outside = [joint.holder[s] for s in hosts]
        # PyTorch drops the sizes that the backward pass does not need, adds the symbols that it does, and says the
        # descriptions of results.
        aot._extract_fwd_bwd_modules(self._module, [*saved, *outside], sizes, num_fwd_outputs=self._forward_outputs)
        described = aot._extract_fwd_bwd_outputs(self._module, num_fwd_outputs=self._forward_outputs)
        # Tensors that may change in place after they were saved come last.
        checked, unchecked = ([node for node in saved if is_unchecked(node) == late] for late in (False, True))
        last = range(len(checked) + len(hosts), len(saved) + len(hosts))
        # PyTorch 2.9 has no such mark, and no such tensors.
        marks = [
            descriptors.SavedForBackwardsNoVcCheckAOTOutput(i)
            if i in last
            else descriptors.SavedForBackwardsAOTOutput(i)
            for i in range(len(saved) + len(hosts) + len(sizes))
        ]
        inputs = [node for node in joint.nodes if node.op == "placeholder"]
        writer = Writer(joint, self._repeated)
        for node in inputs:
            if aot._is_primal(node) or aot._is_fwd_seed_offset(node):
                writer.take(node)
        self._run(writer, first)
        handed_hosts = [writer.hosts[s] for s in hosts]
        forward = writer.finish(
            [*joint.forward_results, *checked, *handed_hosts, *unchecked, *sizes], [*described[2], *marks]
        )
        writer = Writer(joint, self._repeated)
        tangents = [node for node in inputs if aot._is_tangent(node)]
        others = [node for node in inputs if aot._is_bwd_seed_offset(node) or aot._is_backward_state(node)]
        for node in [*sizes, *checked]:
            writer.take(node)
        for storage in hosts:
            writer.take_host(storage)
        for node in [*unchecked, *tangents, *others]:
            writer.take(node)
        self._run(writer, second)
        backward = writer.finish(list(joint.backward_results), list(described[3]))
        make = fx._lazy_graph_module._make_graph_module
        kept = Saved(len(saved) + len(hosts), [s for s in handed if joint.kinds[s] == "act"])
        return make(self._module, forward), make(self._module, backward), kept

    def _run(self, writer: Writer, steps: Timeline) -> None:
        for (action, at), made, in_place in steps:
            op = self._joint.ops[at]
            if action == RUN:
                writer.run(op, in_place)
            elif action == FETCH:
                writer.fetch(op, made)
            else:
                (writer.offload if action == OFFLOAD else writer.release)(op)

    def _handed_over(self, second: Timeline) -> tuple[list[int], list[int]]:
        """Returns the storages that the backward pass reads before it has them, and those whose copies outside it reads so."""
        joint = self._joint
        made: set[int] = set()
        moved: set[int] = set()
        found: dict[int, None] = {}
        hosts: dict[int, None] = {}
        for (action, at), makes, _ in second:
            op = joint.ops[at]
            reads = joint.reads(op) if action == RUN else joint.makes(op) if action != FETCH else []
            if action == OFFLOAD:
                moved.update(reads)
            elif action != RUN:
                hosts |= dict.fromkeys(s for s in [*reads, *makes] if s not in moved)
            if op.draws and op.node not in self._repeated:
                reads = [s for s in reads if s != joint.state(op.node)]
            found |= dict.fromkeys(s for s in reads if s not in made)
            made.update(makes)
        for node in joint.backward_results:
            if isinstance(node, fx.Node):
                found |= dict.fromkeys(s for s in joint.storages(node) if s not in made)
        return list(found), list(hosts)

    def _is_size(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            node.op != "output"
            and isinstance(value, (SymInt, SymFloat, SymBool))
            and not aot._is_tangent(node)
            and not aot._has_tag_is_backward(node)
        )


def is_unchecked(node: fx.Node) -> bool:
    """Returns true for a tensor that PyTorch saves without a check for changes in place, as it does from 2.10 on."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))
