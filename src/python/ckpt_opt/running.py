"""Which forward passes still wait for their backward pass, so that several graphs, or several calls of one, share a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ckpt_opt.planner import Plan

BACKWARD = "CompiledFunctionBackward"
"""The name of the node of autograd's graph that runs a compiled backward pass."""
DEPTH = 4
"""Between it and a result lie at most so many nodes, of views."""


class Running:
    """The plans of forward passes that have run and whose backward pass has not, in order.

    Args:
        check: Called with them where there are more than ever before.
    """

    def __init__(self, check: Callable[[list[Plan]], None]) -> None:
        self._check = check
        self._plans: dict[object, Plan] = {}
        self._most = 1

    def plans(self) -> list[Plan]:
        """Returns the plans, the one that ran first at the front."""
        return list(self._plans.values())

    def watched(self, compiled: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        """Returns a compiled graph whose calls are counted."""

        # No copy of attributes: some of them let PyTorch call the compiled graph instead.
        def run(*args: Any) -> Any:
            results = compiled(*args)
            node = backward_node(results)
            if node is not None:
                self._start(node, plan)
            return results

        return run

    def _start(self, node: Any, plan: Plan) -> None:
        call = object()

        def end(*_: Any) -> None:
            self._plans.pop(call, None)

        self._plans[call] = plan
        node.register_hook(end)
        # A result may be dropped without a backward pass.
        weakref.finalize(node, end).atexit = False
        if len(self._plans) > self._most:
            self._most = len(self._plans)
            self._check(self.plans())


def backward_node(results: Any) -> Any:
    """Returns the node of autograd's graph that runs the backward pass of these results, if there is one."""
    nodes = [
        leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    for _ in range(DEPTH):
        for node in nodes:
            if node.name() == BACKWARD:
                return node
        nodes = [other for node in nodes for other, _ in node.next_functions if other is not None]
    return None


def need(plans: list[Plan]) -> int:
    """Returns the most bytes that are alive at once, where forward passes run in this order and backward passes in reverse.

    While one runs, the others' parameters are alive, what those before it saved, and the gradients of those after it.
    """
    statics = sum(plan.static_bytes for plan in plans)
    later = sum(plan.gradient_bytes for plan in plans)
    before = most = 0
    for plan in plans:
        later -= plan.gradient_bytes
        most = max(most, before + statics - plan.static_bytes + later + plan.step_bytes)
        before += plan.saved_bytes
    return most
