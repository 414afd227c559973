"""Compiles a planned graph by inductor, within the budget.

Inductor fuses kernels and chooses their order, so its peak is not the plan's. The order is taken from the plan where that is
the smaller one, the peak of the generated code is computed before its kernels are compiled, and a graph is planned again, for
less or for more, until its code is as close below the budget as plans allow.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import CodeCacheFuture
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V

from ckpt_opt.dry_run import dry_run
from ckpt_opt.fusion import Search
from ckpt_opt.masks import save_as_bytes
from ckpt_opt.partition import Partitioner, Repeated, steps_in
from ckpt_opt.planner import BudgetError, Plan, PlanWarning, last_plans, mib

ATTEMPTS = 8
SMALL = 8
"""A result is small if an operand takes so many times its bytes."""


def compile_fused(
    partition: Partitioner, module: fx.GraphModule, inputs: list[Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], Plan | None]:
    """Compiles a graph by inductor; returns the function, and the plan if there is one.

    Raises:
        BudgetError: However it is planned, the compiled code takes more than the budget.
    """
    search = Search()
    place: int | None = None
    excess_of: dict[str, int] = {}
    fitting: tuple[Attempt, Plan] | None = None
    smallest: tuple[int, Attempt, Plan] | None = None
    for _ in range(ATTEMPTS):
        lowest_bytes = None
        try:
            attempt = compile_once(partition, module, inputs, options, place, excess_of)
        except Repeated as known:
            excess = excess_of[known.steps]
        else:
            plan = attempt.plan
            if plan is None or plan.compiled_peak_bytes is None or plan.limit_bytes is None:
                return attempt.finished(), plan
            partition.plans.remove(plan)
            last_plans.remove(plan)
            excess = excess_of[steps_in(plan.decisions)] = plan.compiled_peak_bytes - plan.limit_bytes
            if excess <= 0:
                # The search only goes on to larger targets, whose plans cost less.
                fitting = attempt, plan
            if smallest is None or plan.compiled_peak_bytes < smallest[0]:
                smallest = plan.compiled_peak_bytes, attempt, plan
            if excess <= 0 and plan.overhead_pct == 0:
                break
            if plan.is_smallest:
                lowest_bytes = plan.peak_bytes
        place = search.after(partition.targets, partition.place, excess, lowest_bytes)
        if place is None:
            break
    assert smallest is not None
    attempt, plan = fitting or smallest[1:]
    if fitting is None:
        refuse(partition, plan)
    partition.plans.append(plan)
    last_plans.append(plan)
    return attempt.finished(), plan


def refuse(partition: Partitioner, plan: Plan) -> None:
    """Raises or warns that no compiled code was within the budget, as far as was tried, and that this plan's took the least."""
    reached, limit = plan.compiled_peak_bytes or 0, plan.limit_bytes or 0
    message = (
        f"compiled by inductor, the step takes {reached} bytes ({mib(reached)}) at least, as far as was tried; the budget "
        f"leaves {limit} bytes ({mib(limit)})"
    )
    if partition.options.on_infeasible != "smallest":
        raise BudgetError(
            f"{message}\nhelp: a larger budget, inner='aot_eager', or on_infeasible='smallest'",
            reached + plan.held_bytes,
        )
    warnings.warn(f"{message}: compiled for that", PlanWarning, stacklevel=4)


class Deferred:
    """A kernel that is not compiled yet. What a graph takes is known without its kernels, and compiling them takes most of the
    time."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        self.compile_kernel = compile_kernel


@dataclass
class Attempt:
    """A graph as inductor compiled it, but for its kernels, with the plan if there is one."""

    function: Callable[..., Any]
    plan: Plan | None
    passes: list[tuple[fx.GraphModule, Any]]

    def finished(self) -> Callable[..., Any]:
        """Compiles the kernels and returns the function."""
        for _, compiled in self.passes:
            names = getattr(type(getattr(compiled, "compiled_fn_runner", None)), "call", None)
            own = getattr(names, "__globals__", {})
            kernels = {name: kernel.compile_kernel() for name, kernel in own.items() if isinstance(kernel, Deferred)}
            own |= {name: k.result() if isinstance(k, CodeCacheFuture) else k for name, k in kernels.items()}
        return self.function


def compile_once(
    partition: Partitioner,
    module: fx.GraphModule,
    inputs: list[Any],
    options: dict[str, Any],
    place: int | None,
    compiled_before: Iterable[str],
) -> Attempt:
    """Plans and compiles a graph for the target at a place, and computes the peak of what was generated."""
    before = len(partition.plans)
    passes: list[tuple[fx.GraphModule, Any]] = []

    def compile_pass(graph: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        keep_inputs(graph)
        compiled = compile_fx_inner(graph, example_inputs, **kwargs)
        passes.append((graph, compiled))
        return compiled

    cpp_pybinding = AsyncCompile.cpp_pybinding
    deferred = lambda *arguments: Deferred(partial(cpp_pybinding, *arguments))  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(AsyncCompile, "cpp_pybinding", deferred))
        stack.enter_context(partition.aim(place, compiled_before))
        stack.enter_context(V.set_choices_handler(Choices()))
        stack.enter_context(
            config.patch(
                custom_partitioner_fn=InductorPartitioner(partition),
                # It runs after the pass below, and would undo it.
                reorder_for_peak_memory=False,
                _post_fusion_custom_pass=better_order,
                # The pass above is not part of its key.
                fx_graph_cache=False,
            )
        )
        # This planner decides, not a cache.
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(backward_at_once())
        compiled = compile_fx(module, inputs, inner_compile=compile_pass, **options)
    if len(partition.plans) == before:
        return Attempt(compiled, None, passes)
    plan = partition.plans[-1]
    if len(passes) != 2:
        unchecked(plan, f"{len(passes)} passes were compiled")
        return Attempt(compiled, plan, passes)
    try:
        peak = dry_run(passes[0], passes[1], plan.forward_outputs, plan.saved_tensors, partition.prices.scratch)
        plan.compiled_peak_bytes = plan.static_bytes + peak
    except Exception as error:
        unchecked(plan, f"{type(error).__name__}: {error}")
    return Attempt(compiled, plan, passes)


def keep_inputs(graph: fx.GraphModule) -> None:
    """Lets inputs that a graph returns be returned as they are.

    Where a convolution reads them, inductor returns copies of its own layout: what the forward pass saves then takes memory
    twice.
    """
    output = graph.graph.output_node()
    visible = output.meta.get("user_visible_output_idxs", [])
    returned = [i for i, node in enumerate(output.args[0]) if isinstance(node, fx.Node) and node.op == "placeholder"]
    output.meta["user_visible_output_idxs"] = sorted({*visible, *returned})


def backward_at_once() -> AbstractContextManager[Any]:
    """Lets PyTorch compile the backward pass with the forward pass, not in the first step."""
    option = "force_non_lazy_backward_lowering"
    if hasattr(functorch_config, option):
        patched: AbstractContextManager[Any] = functorch_config.patch(option, True)
        return patched
    # PyTorch 2.9 has it as an argument only.
    prepare = aot_autograd.prepare_aot_module_simplified
    return mock.patch.object(aot_autograd, "prepare_aot_module_simplified", partial(prepare, **{option: True}))


def unchecked(plan: Plan, reason: str) -> None:
    """Warns that the peak of compiled code is not known."""
    warnings.warn(
        f"the peak of the compiled code could not be computed ({reason}); planned are {mib(plan.peak_bytes)}",
        PlanWarning,
        stacklevel=4,
    )


class InductorPartitioner(CustomPartitionerFn):
    """The form in which inductor takes a partitioner, with what its caches need to know of it."""

    def __init__(self, partition: Partitioner) -> None:
        self._partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits a joint graph."""
        passes = self._partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        save_as_bytes(*passes, num_fwd_outputs)
        return passes

    def uuid(self) -> str:
        """Returns what compiled code depends on besides the graph."""
        return self._partition.key()

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # Caches pickle the configuration to hash it.
        return str, (self.uuid(),)


class Choices(InductorChoices):
    """Inductor's choices, but that kernels of different chunks of a loss are not fused: they would need all chunks at once."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Returns true if two kernels may be fused."""
        if chunks_of(node1) != chunks_of(node2):
            return False
        return bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))


def chunks_of(node: Any) -> set[int | None]:
    """Returns the chunks of a loss that a kernel computes."""
    parts = (part.node for part in node.get_nodes())
    return {origin.meta.get("chunk") for part in parts if part is not None for origin in part.get_origins()}


def better_order(nodes: list[Any]) -> list[Any]:
    """Orders fused kernels as the plan has them, so with small results early, or as inductor would, whichever has the smallest peak
    by inductor's estimate."""
    from torch._inductor import memory

    scheduler = V.graph.scheduler
    inputs, outputs = (
        torch.utils._ordered_set.OrderedSet(names) for names in (V.graph.graph_inputs, V.graph.get_output_names())
    )
    # In a planned order, the estimate is for the order as given.
    planned = planned_order(nodes)
    if any(getattr(getattr(node.node, "op_overload", None), "namespace", "") == "ckpt_opt" for node in nodes):
        # The estimate takes the host's memory for the device's.
        return planned
    _, freeable = memory.prepare_planning_info(
        planned, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    )
    sizes = {name: buffer.mpi_buffer.size_free for name, buffer in scheduler.name_to_buf.items()}
    orders = [
        planned,
        planned_order(nodes, sizes),
        memory.reorder_for_peak_memory(nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs),
    ]
    return min(orders, key=lambda order: memory.estimate_peak_memory(order, freeable, outputs)[0])


def planned_order(nodes: list[Any], sizes: dict[str, int] | None = None) -> list[Any]:
    """Orders fused kernels by the places of what they compute in the plan.

    Inductor numbers kernels in the order of the graph, which is the plan's. A fused kernel cannot run before its last part. Where
    sizes of buffers are given, a kernel with a small result runs as soon as it can: inductor computes such a result only where
    it is read, and keeps large operands until then.
    """
    made_by = {name: node for node in nodes for name in node.get_buffer_names()}
    before = {node: {made_by[d.name] for d in node.unmet_dependencies if d.name in made_by} - {node} for node in nodes}
    after: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node, earlier in before.items():
        for other in earlier:
            after[other].append(node)
    place = {node: (max(part.min_order for part in node.get_nodes()), i) for i, node in enumerate(nodes)}
    if sizes is not None:
        for i, node in enumerate(nodes):
            read = max((sizes.get(dependency.name, 0) for dependency in node.unmet_dependencies), default=0)
            made: int = sum(sizes.get(name, 0) for name in node.get_buffer_names())
            if SMALL * made <= read:
                place[node] = (-1, i)
    ready = [(place[node], i) for i, node in enumerate(nodes) if not before[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for later in after[node]:
            before[later].discard(node)
            if not before[later]:
                heapq.heappush(ready, (place[later], place[later][1]))
    # Inductor's order holds where dependencies are of a kind that is not known here.
    return order if len(order) == len(nodes) else nodes
