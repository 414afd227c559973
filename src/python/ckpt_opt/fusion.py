"""Finds what a compiler recomputes for free, and the peaks to plan for where its code decides the real one."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import fx
from torch._functorch import config
from torch._functorch import partitioners as aot

from ckpt_opt.joint import is_pointwise, is_view, number, tensors_of
from ckpt_opt.planner import PlanWarning

STEP = 0.95
"""Each target is so many times the one before it, both above what is static."""

LARGER = (2, 4, 6)
"""If the code of the plan with the smallest peak misses the limit, the targets so many places before it are tried."""

BROADCAST = 8
"""A node is broadcast if a fused kernel would compute each of its elements at least this many times."""


class Saved(Exception):
    """Ends PyTorch's partitioner once it has chosen the nodes to save."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        super().__init__()
        self.nodes = nodes


def free_nodes(module: fx.GraphModule, forward_outputs: int) -> set[str]:
    """Returns the names of the nodes that PyTorch's partitioner recomputes without a budget, and of the nodes of the backward pass.

    Kernels of the backward pass recompute these results from what they read anyway. To keep them costs time, because they are
    then written and read. `broadcast_nodes` are left out, because recomputing them is slow. If the partitioner cannot be asked, a
    warning says so, and no names are returned.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results: Any = graph.graph_copy(module.graph, copies)
    graph.output(results).meta = dict(module.graph.output_node().meta)
    originals = {copy: node for node, copy in copies.items()}
    asked_for = set()
    for copy, node in originals.items():
        mark = copy.meta.pop("recompute", None)
        if mark is aot.CheckpointPolicy.MUST_SAVE:
            copy.meta["recompute"] = mark
        # Where a user only prefers to recompute, the plan decides.
        if mark is aot.CheckpointPolicy.MUST_RECOMPUTE:
            asked_for.add(node.name)
    try:
        choose = aot.choose_saved_values_set

        def chosen(*args: Any, **kwargs: Any) -> Any:
            raise Saved(choose(*args, **kwargs))

        # Nodes that compute the same are one already.
        with (
            config.patch(activation_memory_budget=1.0, cse=False),
            mock.patch.object(aot, "choose_saved_values_set", chosen),
        ):
            aot.min_cut_rematerialization_partition(
                fx.GraphModule(module, graph), None, num_fwd_outputs=forward_outputs
            )
        return set()
    except Saved as saved:
        found = set(saved.nodes)
    except Exception as error:
        warnings.warn(
            f"PyTorch's partitioner does not tell what compiled code recomputes for free ({type(error).__name__}: {error}): "
            "the plan saves more than it needs, and steps may take longer",
            PlanWarning,
            stacklevel=3,
        )
        return set()
    stack = [node for node in results[forward_outputs:] if isinstance(node, fx.Node)]
    recomputed = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            recomputed.add(originals[node].name)
            stack.extend(node.all_input_nodes)
    return recomputed - asked_for - broadcast_nodes(module.graph)


def broadcast_nodes(graph: fx.Graph) -> set[str]:
    """Returns the names of the nodes whose elements a fused kernel would compute many times.

    A kernel that recomputes a node does so once for each element of the kernel's result. A table of sines that is broadcast to all
    heads is computed once per head that way. Reading a saved table is much faster. Constants are not included: they are as
    cheap as a read.
    """
    sizes = {node: sum(number(tensor.numel()) for tensor in tensors_of(node.meta.get("val"))) for node in graph.nodes}
    computed: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        fused = (user for user in node.users if is_view(user) or is_pointwise(user))
        computed[node] = max([sizes[node], *(computed[user] for user in fused)])
    return {
        node.name
        for node in graph.nodes
        if node.all_input_nodes and not is_view(node) and 0 < BROADCAST * sizes[node] <= computed[node]
    }


def leave_to_plan(graph: dict[str, Any], free: set[str]) -> None:
    """Lets a plan of a cost graph keep the results of these ops: near the smallest peak, it may have to."""
    for op in graph["ops"]:
        op["must_recompute"] &= op["name"] not in free


@dataclass(frozen=True)
class Targets:
    """The peaks to plan for, in bytes. The first is that of a plan without a limit.

    They do not depend on the budget, so a larger budget takes the same plan as a smaller one, or one before it.
    """

    first: int
    static: int

    def __getitem__(self, place: int) -> int:
        """Returns the target at a place."""
        return self.static + max(1, int((self.first - self.static) * STEP**place))

    def within(self, limit: int) -> int:
        """Returns the place of the largest target within a limit."""
        if limit >= self.first:
            return 0
        share = max(1, limit - self.static) / (self.first - self.static)
        place = math.floor(math.log(share, STEP))
        while self[place] > max(limit, self.static + 1):
            place += 1
        return place


class Search:
    """Looks for the largest target at which the code of a plan is within a limit."""

    def __init__(self) -> None:
        self._missed = -1
        self._met: int | None = None
        self._larger: list[int] | None = None

    def after(self, targets: Targets, place: int, excess: int, lowest_bytes: int | None = None) -> int | None:
        """Returns the place to try next, or `None` if there is none left.

        Args:
            targets: The targets.
            place: The place that was tried.
            excess: The bytes that its code took above the limit; less than 0 for what was left.
            lowest_bytes: The peak of the plan, if no plan has a smaller one.
        """
        if lowest_bytes is not None and excess > 0:
            # Inductor's code for a plan with a larger peak may take less.
            nearest = targets.within(lowest_bytes)
            self._larger = [nearest - places for places in LARGER if places <= nearest]
        if self._larger is not None:
            return self._larger.pop(0) if self._larger and excess > 0 else None
        nearest = targets.within(targets[place] - excess)
        if excess > 0:
            self._missed = place
        else:
            self._met = place
        last = None if self._met is None else self._met - 1
        if last is not None and last <= self._missed:
            return None
        return max(self._missed + 1, nearest if last is None else min(nearest, last))
