"""Writes ops of a joint graph as a graph of their own, in the order of a plan, some of them several times."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._prims.rng_prims import run_with_rng_state

from ckpt_opt.joint import Joint, Op


class Writer:
    """Builds one graph. Every use of a node reads its newest computation.

    Args:
        joint: The joint graph.
        repeated: Draws that run more than once.
    """

    def __init__(self, joint: Joint, repeated: set[fx.Node]) -> None:
        self.graph = fx.Graph()
        self._joint = joint
        self._repeated = repeated
        self._written: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        """Makes a node of the joint graph an input of this graph."""
        new = self.graph.placeholder(node.name)
        new.meta = node.meta
        self._written[node] = new

    def run(self, op: Op) -> None:
        """Writes an op, and the parts of a tuple at once, so that one that nothing reads is freed."""
        if op.takes_state:
            return
        node = op.node
        state, drawn = self._parts(node) if op.draws else (None, None)
        for view in self._views(node):
            if view is not state:
                self._written.pop(view, None)
        if drawn is None:
            self._written[node] = self._copy(node)
            self._write_parts(node)
        elif node not in self._repeated:
            target, *arguments = node.args
            assert callable(target)
            self._written[drawn] = self._call(target, tuple(arguments), node, drawn)
            self._write_parts(drawn)
        elif state in self._written:
            self._written[drawn] = self._call(run_with_rng_state, (self._written[state], *node.args), node, drawn)
            self._write_parts(drawn)
        else:
            self._written[node] = self._copy(node)
            self._write_parts(node)
            self._write_parts(drawn)

    def finish(self, results: list[Any], descriptions: list[Any]) -> fx.Graph:
        """Writes the outputs, and returns the graph."""
        out = self.graph.output(tuple(self._read(r) if isinstance(r, fx.Node) else r for r in results))
        out.meta["desc"] = descriptions
        self.graph.lint()
        return self.graph

    def _parts(self, pair: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
        """Returns the nodes of the state and of what is drawn."""
        parts = {user.args[1]: user for user in pair.users if user.target is operator.getitem}
        return parts.get(0), parts.get(1)

    def _call(self, target: Any, arguments: tuple[Any, ...], node: fx.Node, of: fx.Node) -> fx.Node:
        kwargs = node.kwargs
        mapped = fx.node.map_arg((arguments, kwargs), lambda n: n if n.graph is self.graph else self._read(n))
        new = self.graph.call_function(target, mapped[0], mapped[1])
        new.meta = dict(of.meta)
        return new

    def _write_parts(self, node: fx.Node) -> None:
        for user in node.users:
            if user.target is operator.getitem:
                self._written[user] = self._copy(user)

    def _read(self, node: fx.Node) -> fx.Node:
        if node not in self._written:
            assert node not in self._joint.computes, f"the plan reads {node} before anything computes it"
            self._written[node] = self._copy(node)
        return self._written[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        for operand in node.all_input_nodes:
            self._read(operand)
        return self.graph.node_copy(node, self._read)

    def _views(self, node: fx.Node) -> set[fx.Node]:
        """Returns what only looks at the results of a node, directly or through others."""
        found: set[fx.Node] = set()
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if user not in found and user not in self._joint.computes and user.op != "output":
                    found.add(user)
                    stack.append(user)
        return found
