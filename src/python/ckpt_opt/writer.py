"""Writes ops of a joint graph as a graph of their own, in the order of a plan, some of them several times."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._prims.rng_prims import run_with_rng_state

import ckpt_opt.offload  # noqa: F401
from ckpt_opt.joint import IN_PLACE, Joint, Op


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
        self.hosts: dict[int, fx.Node] = {}
        """Copies of storages outside the device's memory."""
        self._on_the_way: set[int] = set()
        """Storages that are fetched, and that nothing has read since."""

    def take(self, node: fx.Node) -> None:
        """Makes a node of the joint graph an input of this graph."""
        new = self.graph.placeholder(node.name)
        new.meta = node.meta
        self._written[node] = new

    def take_host(self, storage: int) -> None:
        """Makes the copy of a storage outside the device's memory an input of this graph."""
        holder = self._joint.holder[storage]
        new = self.graph.placeholder(f"{holder.name}_host")
        new.meta = {"val": outside(holder.meta["val"])}
        self.hosts[storage] = new

    def offload(self, op: Op) -> None:
        """Writes that the results of an op begin to leave the device."""
        for storage in self._joint.makes(op):
            holder = self._joint.holder[storage]
            new = self.graph.call_function(torch.ops.ckpt_opt.offload.default, (self._read(holder),))
            new.meta = {"val": outside(holder.meta["val"])}
            self.hosts[storage] = new

    def release(self, op: Op) -> None:
        """Writes that the results of an op have left the device."""
        for storage in self._joint.makes(op):
            left = self._read(self._joint.holder[storage])
            self.graph.call_function(torch.ops.ckpt_opt.release.default, (self.hosts[storage], left))

    def fetch(self, op: Op, storages: Iterable[int]) -> None:
        """Writes that these results of an op begin to come back."""
        self._forget(op)
        for storage in storages:
            holder = self._joint.holder[storage]
            device = holder.meta["val"].device
            new = self.graph.call_function(torch.ops.ckpt_opt.fetch.default, (self.hosts[storage], device))
            new.meta = dict(holder.meta)
            self._on_the_way.add(storage)
            # A part of a tuple may have several names.
            same = [user for user in op.node.users if user.target is operator.getitem]
            for node in [holder, *(user for user in same if self._joint.storages(user) == [storage])]:
                self._written[node] = new

    def arrive(self, storages: Iterable[int]) -> None:
        """Writes that these storages are there, where they were fetched."""
        for storage in sorted(self._on_the_way.intersection(storages)):
            self._on_the_way.remove(storage)
            there = self._read(self._joint.holder[storage])
            self.graph.call_function(torch.ops.ckpt_opt.arrive.default, (there,))

    def run(self, op: Op, in_place: bool = False) -> None:
        """Writes an op, and the parts of a tuple at once, so that one that nothing reads is freed."""
        if op.takes_state:
            return
        self.arrive(self._joint.reads(op))
        node = op.node
        state, drawn = self._parts(node) if op.draws else (None, None)
        self._forget(op)
        if drawn is None:
            self._written[node] = self._copy(node)
            if in_place:
                self._written[node].target = IN_PLACE[node.target]
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
        self.arrive(list(self._on_the_way))
        out = self.graph.output(
            tuple(self._read(r) if isinstance(r, fx.Node) and r.graph is not self.graph else r for r in results)
        )
        out.meta["desc"] = descriptions
        self.graph.lint()
        return self.graph

    def _forget(self, op: Op) -> None:
        """Lets views of the results of an op be written again. The state that a draw started from stays."""
        state = self._parts(op.node)[0] if op.draws else None
        for view in self._views(op.node):
            if view is not state:
                self._written.pop(view, None)

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


def outside(value: torch.Tensor) -> torch.Tensor:
    """Returns the description of a tensor's copy outside the device's memory."""
    with detect_fake_mode([value]) or nullcontext():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
