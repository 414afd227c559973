"""The joint graph of AOTAutograd by storages: which nodes compute, what they read and make, and how many bytes that takes.

AOTAutograd traces forward and backward pass into one FX graph. Nodes that only look at a storage in another way (views,
parts of a tuple, sizes) cost nothing and are written where they are read; all others are *ops* of the cost graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._functorch import partitioners as aot
from torch._prims.rng_prims import run_and_save_rng_state
from torch.utils._pytree import tree_leaves, tree_map

COLLECTIVES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "c10d",
    "fsdp",
    "_dtensor",
    "symm_mem",
)
"""Namespaces of ops that communicate with other processes."""
REPEATABLE_HIGHER_ORDER = ("flex_attention", "flex_attention_backward")
NUMBERED = re.compile(r"""[.\['"]\d+['"\]]*$""")
COPY = torch.ops.aten.copy_.default
IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.addmm.default: torch.ops.aten.addmm_.default,
}
"""Ops that can write their result over the first operand, and the ops that do. Nodes that may are marked `in_place`."""

Price = Callable[[fx.Node], tuple[float, int, int, int]]
"""Returns the time of a node in microseconds, its floating-point operations, the bytes that it reads and writes, and those
that it takes while it runs besides operands and results."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a node returns."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def number(size: Any) -> int:
    """Returns a size. A symbolic one is planned at its size in the first call; `int` would make it constant."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes between the first and the last element of a dense tensor."""
    sizes = [number(size) for size in tensor.shape]
    if 0 in sizes:
        return 0
    last = sum((size - 1) * number(stride) for size, stride in zip(sizes, tensor.stride()))
    return (last + 1) * int(tensor.element_size())


def schema_of(node: fx.Node) -> Any:
    """Returns the schema of a node's op, or `None` for a higher-order op or a Python function."""
    return getattr(node.target, "_schema", None)


def layer_of(node: fx.Node) -> str | None:
    """Returns the path of the outermost module around a node that has a number, as a `ModuleList` gives it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = (str(path) for path, _ in stack.values())
    return next((path for path in paths if NUMBERED.search(path)), None)


def signature(target: Any, values: Any) -> str:
    """Returns the name of an op and the shapes of its operands, as `aten::mm(8x16, 16x4)`."""
    shapes = ["x".join(str(number(n)) for n in tensor.shape) for tensor in tensors_of(values)]
    schema = getattr(target, "_schema", None)
    return f"{target if schema is None else schema.name}({', '.join(shapes)})"


def is_view(node: fx.Node) -> bool:
    """Returns true if every tensor that the node returns has the storage of its first operand."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default) or is_wait(node):
        return True
    schema = schema_of(node)
    if schema is None or schema.is_mutable or not schema.returns:
        return False
    return all(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


def is_pointwise(node: fx.Node) -> bool:
    """Returns true if each element of the result depends on one element of each operand, by PyTorch's tag."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_collective(target: Any) -> bool:
    """Returns true if an op communicates with other processes."""
    return getattr(target, "namespace", "") in COLLECTIVES


def is_wait(node: fx.Node) -> bool:
    """Returns true if the node waits for a collective. It returns its operand, though its schema does not say so."""
    return is_collective(node.target) and getattr(node.target, "_opname", "") == "wait_tensor"


def is_mutable(node: fx.Node) -> bool:
    """Returns true if the node writes to an operand."""
    schema = schema_of(node)
    return schema is not None and schema.is_mutable


def is_silent(node: fx.Node) -> bool:
    """Returns true if the op could draw random numbers, but does not with these arguments: attention without dropout."""
    arguments = schema_of(node).arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), node.args)) | node.kwargs
    return bool(given.get("dropout_p", 1.0) == 0.0)


def keep_states(module: fx.GraphModule) -> None:
    """Lets each op that draws random numbers say the generator's state before it, from which it can run again.

    `y = dropout(x)` becomes `pair = run_and_save_rng_state(dropout, x); y = pair[1]`. Where nothing reads the state in the
    end, the writer puts the op itself back.
    """
    for node in list(module.graph.nodes):
        tags = getattr(node.target, "tags", ())
        if getattr(node.target, "namespace", "") != "aten" or torch.Tag.nondeterministic_seeded not in tags:
            continue
        tensors = tensors_of(node.meta.get("val"))
        if not tensors or is_silent(node) or aot._must_be_in_backward(node):
            continue
        state = torch.cuda.get_rng_state if tensors[0].device.type == "cuda" else torch.get_rng_state
        mode = detect_fake_mode(tensors)
        with module.graph.inserting_before(node):
            pair = module.graph.call_function(run_and_save_rng_state, (node.target, *node.args), node.kwargs)
            drawn = module.graph.call_function(operator.getitem, (pair, 1))
            own = module.graph.call_function(operator.getitem, (pair, 0))
        own.meta["val"] = mode.from_tensor(state()) if mode else state()
        drawn.meta = dict(node.meta)
        pair.meta = node.meta | {"val": (own.meta["val"], node.meta["val"])}
        node.replace_all_uses_with(drawn)
        module.graph.erase_node(node)


def is_repeatable(node: fx.Node) -> bool:
    """Returns true if the node gives the same bits when it runs again, and may run again."""
    if aot._must_be_in_forward(node) or aot._must_be_in_backward(node):
        return False
    if is_collective(node.target):
        return False
    if node.meta.get("recompute") is aot.CheckpointPolicy.MUST_SAVE:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not is_silent(node):
        return False
    if schema_of(node) is None:
        return getattr(node.target, "__name__", "") in REPEATABLE_HIGHER_ORDER
    return not is_mutable(node)


@dataclass(frozen=True)
class Op:
    """One op of the cost graph.

    An op that draws is two: the first takes the generator's state, and runs once; the second may run again from there.
    """

    node: fx.Node
    takes_state: bool = False

    @property
    def draws(self) -> bool:
        """Returns true if the node is a draw whose state is kept."""
        return self.node.target is run_and_save_rng_state


class Joint:
    """A joint graph by storages.

    Attributes:
        ops: What computes, in order.
        boundary: The first so many ops are the forward pass.
        holder: For each storage, the node that stands for it when it is handed over.
        made_by: For each storage, the index of the op that computes it, or `None`.
        sizes: For each storage, its bytes.
    """

    def __init__(self, module: fx.GraphModule, forward_outputs: int) -> None:
        self.nodes = list(module.graph.nodes)
        results: Any = self.nodes[-1].args[0]
        self.forward_results = list(results[:forward_outputs])
        self.backward_results = list(results[forward_outputs:])
        self.holder: list[fx.Node] = []
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        # The storages of what a node returns, in the form of what it returns; -1 for what is no tensor.
        self._trees: dict[fx.Node, Any] = {}
        self.computes: dict[fx.Node, list[int]] = {}
        for node in self.nodes[:-1]:
            self._add(node)
        first, last = self._phases()
        self.ops = [op for node in first for op in ops_of(node)]
        self.boundary = len(self.ops)
        self.ops += [op for node in last for op in ops_of(node)]
        self.made_by: list[int | None] = [None] * len(self.holder)
        for i, op in enumerate(self.ops):
            for storage in self.makes(op):
                self.made_by[storage] = i
        # A storage that is written in place holds something else afterwards.
        self.written = {s for node in self.computes if node.target is COPY for s in self.storages(node)}

    def storages(self, node: fx.Node) -> list[int]:
        """Returns the storages of the tensors that a node returns."""
        return [s for s in tree_leaves(self._trees.get(node)) if isinstance(s, int) and s >= 0]

    def reads(self, op: Op) -> list[int]:
        """Returns the storages that an op reads, each once."""
        found = {s for operand in op.node.all_input_nodes for s in self.storages(operand)}
        if op.takes_state:
            return []
        return sorted(found | {self.state(op.node)} if op.draws else found)

    def makes(self, op: Op) -> list[int]:
        """Returns the storages that an op computes."""
        made = self.computes[op.node]
        if not op.draws:
            return made
        state = self.state(op.node)
        return [state] if op.takes_state else [s for s in made if s != state]

    def state(self, node: fx.Node) -> int:
        """Returns the storage of the generator's state that a draw starts from."""
        return int(self._trees[node][0])

    def results(self, nodes: Iterable[Any]) -> set[int]:
        """Returns the storages of these results that are not there throughout."""
        return {s for n in nodes if isinstance(n, fx.Node) for s in self.storages(n) if self.kinds[s] != "static"}

    def _new(self, node: fx.Node, value: Any, kind: str) -> int:
        if not isinstance(value, torch.Tensor):
            return -1
        self.holder.append(node)
        self.sizes.append(bytes_of(value))
        self.kinds.append(kind)
        return len(self.holder) - 1

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            kind = "ph" if aot._is_tangent(node) else "static"
            self._trees[node] = tree_map(lambda leaf: self._new(node, leaf, kind), value)
        elif node.target is operator.getitem:
            whole, part = node.args
            assert isinstance(whole, fx.Node)
            self._trees[node] = self._trees[whole][part] if isinstance(value, (torch.Tensor, tuple, list)) else None
            if isinstance(value, torch.Tensor):
                # A part is handed over, not the tuple.
                for storage in self.storages(node):
                    if not isinstance(self.holder[storage].meta["val"], torch.Tensor):
                        self.holder[storage] = node
        elif tensors_of(value) and is_view(node) and node.all_input_nodes:
            base = self.storages(node.all_input_nodes[0])[0]
            self._trees[node] = tree_map(lambda _: base, value)
            if is_wait(node) and self.kinds[base] == "act":
                # What is handed over has arrived.
                self.holder[base] = node
        elif node.target is COPY:
            assert isinstance(node.args[0], fx.Node)
            self._trees[node] = self._trees[node.args[0]]
            self.computes[node] = []
        elif tensors_of(value):
            before = len(self.holder)
            self._trees[node] = tree_map(lambda leaf: self._new(node, leaf, "act"), value)
            self.computes[node] = list(range(before, len(self.holder)))
        elif node.op == "call_function" and is_mutable(node):
            self.computes[node] = []

    def _phases(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Returns the nodes that compute in the forward pass and those in the backward pass.

        The forward pass ends with the last node that its results need. What must be in it and stands later, as writes to
        buffers do, follows.
        """
        order = list(self.computes)
        needed = ancestors(n for n in self.forward_results if isinstance(n, fx.Node))
        end = max((i for i, node in enumerate(order) if node in needed), default=-1) + 1
        late = ancestors(node for node in order[end:] if aot._must_be_in_forward(node))
        moved = [node for node in order[end:] if node in late]
        return order[:end] + moved, [node for node in order[end:] if node not in late]

    def _written_over(self, op: Op) -> list[int]:
        """Returns the storage that an op may write its result over, if there is one."""
        total = op.node.args[0] if "in_place" in op.node.meta else None
        return self.storages(total) if isinstance(total, fx.Node) else []

    def gradient_bytes(self) -> int:
        """Returns the bytes of what the backward pass returns."""
        return sum(self.sizes[s] for s in self.results(self.backward_results) if self.kinds[s] == "act")

    def kept_calls(self, saved: set[int]) -> dict[str, tuple[int, int]]:
        """Returns how many calls of an op keep most of their results in `saved` storages, of how many, by signature."""
        found: dict[str, tuple[int, int]] = {}
        for op in self.ops[: self.boundary]:
            made = self.makes(op)
            keeps = 2 * sum(self.sizes[s] for s in made if s in saved) > sum(self.sizes[s] for s in made)
            name = signature(
                op.node.target, fx.node.map_arg((op.node.args, op.node.kwargs), lambda n: n.meta.get("val"))
            )
            kept, total = found.get(name, (0, 0))
            found[name] = kept + keeps, total + 1
        return found

    def cost_graph(self, price: Price, in_place: bool, free: set[str] | None = None) -> dict[str, Any]:
        """Returns the cost graph that `ckpt-opt plan` reads.

        Args:
            price: Prices nodes.
            in_place: Results may be written over operands.
            free: The names of nodes. Those of the forward pass cost nothing, and the backward pass has to recompute them.
        """
        ops = []
        layers: dict[str, int] = {}
        handed_out = self.results(self.forward_results)
        for i, op in enumerate(self.ops):
            cost, flops, moved, scratch = (0.0, 0, 0, 0) if op.takes_state else price(op.node)
            reads = self.reads(op)
            may_repeat = op.draws and not op.takes_state if op.draws else is_repeatable(op.node)
            # The caller holds what the model returns, so that a copy would be a second one.
            may_repeat = may_repeat and handed_out.isdisjoint(self.makes(op)) and self.written.isdisjoint(reads)
            is_free = i < self.boundary and may_repeat and op.node.name in (free or ())
            path = layer_of(op.node) if i < self.boundary else None
            ops.append(
                {
                    "name": f"{op.node.name} (state)" if op.takes_state else op.node.name,
                    "kind": str(op.node.args[0] if op.draws else op.node.target),
                    "ins": reads,
                    "outs": self.makes(op),
                    "cost": 0.0 if is_free else cost,
                    "flops": flops,
                    "bytes": moved,
                    "temp_bytes": scratch,
                    "in_place_operands": self._written_over(op) if in_place else [],
                    "layer": None if path is None else layers.setdefault(path, len(layers)),
                    "phase": "fwd" if i < self.boundary else "bwd",
                    "recomputable": may_repeat,
                    # Processes that call collectives in different orders wait for each other forever.
                    "ordered": is_collective(op.node.target),
                    "must_recompute": is_free or op.node.meta.get("recompute") is aot.CheckpointPolicy.MUST_RECOMPUTE,
                }
            )
        values = [
            {"bytes": size, "kind": kind, "producer": maker}
            for size, kind, maker in zip(self.sizes, self.kinds, self.made_by)
        ]
        # Autograd holds the gradients of the model's results until the backward pass has ended.
        held = {s for s, kind in enumerate(self.kinds) if kind == "ph"}
        outputs = held | self.results([*self.forward_results, *self.backward_results])
        return {"ops": ops, "values": values, "outputs": sorted(outputs)}


def ops_of(node: fx.Node) -> list[Op]:
    """Returns the ops of the cost graph for a node that computes."""
    return [Op(node, takes_state=True), Op(node)] if node.target is run_and_save_rng_state else [Op(node)]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns these nodes and all that they depend on."""
    stack = list(nodes)
    found = set(stack)
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                stack.append(operand)
    return found
