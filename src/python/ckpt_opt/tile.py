"""Computes the head and the loss of a model chunk by chunk along its tokens, so that the scores never exist whole.

The scores of all tokens for all classes are the widest tensor of a language model, and they live where the backward pass begins,
so no recomputation lowers their peak. Each token is independent from the head's product to the loss and back. So the region
around the scores is written once for every chunk of the tokens, forward and backward together, before the forward pass ends.
The gradient that the loss will get is not known there: the region computes with 1 in its place, and its results are
multiplied by it later. Sums over chunks round differently from one sum; those of 16-bit numbers are float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.utils import detect_fake_mode
from torch._functorch import partitioners as aot
from torch.fx.experimental.proxy_tensor import make_fx

from ckpt_opt.joint import IN_PLACE, ancestors, is_repeatable, schema_of
from ckpt_opt.rows import HALVES, Fit, Refused, Rows, Sum, fit, shape_of

aten = torch.ops.aten
LIKELIHOOD = aten.nll_loss_forward.default
FILLED = {aten.new_full.default: None, aten.new_ones.default: 1, aten.new_zeros.default: 0}
"""Ops that read of their operand only its type, and what they fill a tensor with; `None` where an argument says it."""
HEADS = (aten.mm.default, aten.addmm.default)


def tile_loss(module: fx.GraphModule, count: int | str) -> int:
    """Rewrites a joint graph so that its loss is computed in so many chunks, or `'auto'`; returns their number.

    Raises:
        Refused: There is no loss that can be cut; the graph computes what it did.
    """
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    if any(
        isinstance(size, torch.SymInt) for v in inputs for size in (v.shape if isinstance(v, torch.Tensor) else [v])
    ):
        raise Refused("its sizes are dynamic; torch.compile(dynamic=False) makes them static")
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=LIKELIHOOD):
        decompose(graph, node)
    for target, value in FILLED.items():
        for node in graph.find_nodes(op="call_function", target=target):
            fill(graph, node, node.args[2] if value is None else value)
    scores = find_scores(graph)
    region = Region(scores)
    tokens, classes = region.tokens, region.classes
    width = shape_of(scores.args[-2])[1]
    chunks = min(tokens, -(-classes // width) if isinstance(count, str) else count)
    if chunks < 2:
        raise Refused(f"its {tokens} tokens with {classes} scores each make {chunks} chunk")
    module.graph = Rewriting(graph, region, chunks).graph
    return chunks


def decompose(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a node by the ops that PyTorch decomposes it into."""
    operands = node.all_input_nodes
    values = [operand.meta["val"] for operand in operands]

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(operands, tensors))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: given[n])
        return node.target(*args, **kwargs)

    with detect_fake_mode(values):
        body = make_fx(call, decomposition_table=get_decompositions([node.target]))(*values)
    env: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), operands))
    results: Any = ()
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "output":
                results = inner.args[0]
            elif inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda n: env[n])
                env[inner].meta = {k: v for k, v in node.meta.items() if k != "val"} | {"val": inner.meta["val"]}
    for part in list(node.users):
        part.replace_all_uses_with(env[results[part.args[1]]])
        graph.erase_node(part)
    graph.erase_node(node)


def fill(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    """Replaces a node by one that makes the same tensor and reads no operand."""
    made = node.meta["val"]
    kwargs = {"dtype": made.dtype, "device": made.device, "pin_memory": False}
    with graph.inserting_before(node):
        new = graph.call_function(aten.full.default, (list(made.shape), value), kwargs)
    new.meta = node.meta
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def find_scores(graph: fx.Graph) -> fx.Node:
    """Returns the product whose results become scores for labels; the largest, if there are several."""
    found: list[fx.Node] = []
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        values, _, labels = node.args
        if not aot._has_tag_is_backward(node) and shape_of(labels)[-1] == 1 and values.meta["val"].is_floating_point():
            found += heads_of(values, math.prod(shape_of(values)))
    if not found:
        raise Refused("no head was found whose scores are compared with labels")
    return max(found, key=lambda head: math.prod(shape_of(head)))


def heads_of(values: fx.Node, size: int) -> Iterator[fx.Node]:
    """Returns products that are as large as the values that are made of them, and wider than their operand."""
    stack, seen = [values], {values}
    while stack:
        node = stack.pop()
        if node.target in HEADS and shape_of(node)[1] > shape_of(node.args[-2])[1]:
            yield node
            continue
        for operand in node.all_input_nodes:
            value = operand.meta.get("val")
            if operand not in seen and isinstance(value, torch.Tensor) and value.numel() >= size:
                seen.add(operand)
                stack.append(operand)


class Region:
    """The nodes that make or read a value with as many numbers for each token as there are scores, and all between them.

    Attributes:
        fits: How each of its nodes treats rows, in the order of the graph.
        rows: The rows of each of its results and of what it reads, but for sums.
        taken: The slice of the tokens that the loss reads, if it does not read all. Chunks have no other tokens.
        tokens: So many pass through the region.
        tangent: The input of the graph that is the gradient of the loss.
        learns: The nodes that depend on it.
    """

    def __init__(self, scores: fx.Node) -> None:
        self.scored, self.classes = shape_of(scores)
        self._graph = scores.graph
        self._place = {node: i for i, node in enumerate(self._graph.nodes)}
        self._fits: dict[fx.Node, Fit] = {}
        self._known: dict[fx.Node, Rows | Sum] = {scores: Rows(0, 1)}
        self._grow(scores)
        self.fits = dict(sorted(self._fits.items(), key=lambda pair: self._place[pair[0]]))
        self.rows = {node: rows for node, rows in self._known.items() if isinstance(rows, Rows)}
        slices = {found.taken for found in self.fits.values() if found.taken is not None}
        self.taken = slices.pop() if slices else None
        self.tokens = self.scored if self.taken is None else math.prod(self.taken.after)
        if slices:
            raise Refused("it reads several slices of the tokens")
        tangents = [n for n in ancestors(self.fits) if n.op == "placeholder" and aot._is_tangent(n)]
        if len(tangents) != 1 or shape_of(tangents[0]):
            raise Refused("it depends on the gradients of several results, or of one that is no scalar")
        self.tangent = tangents[0]
        self.learns = descendants([self.tangent])
        self._check()

    def _grow(self, scores: fx.Node) -> None:
        waiting = {scores}
        while waiting:
            while waiting:
                node = min(waiting, key=self._place.__getitem__)
                waiting.remove(node)
                waiting |= self._add(node) - self._fits.keys()
            between = descendants(self._fits) & ancestors(self._fits)
            waiting = between - self._fits.keys()

    def _add(self, node: fx.Node) -> set[fx.Node]:
        """Adds a node; returns those that have to follow."""
        if node.op == "output":
            raise Refused(
                "the scores, or what is as wide, are results of the compiled function: let it return the loss only"
            )
        found = fit(node, self._known)
        self._fits[node] = found
        follow: set[fx.Node] = set()
        for value, rows in [*found.operands.items(), (node, found.result)]:
            before = self._known.get(value)
            if before is not None and before != rows:
                raise Refused(f"`{node.name}` reads the tokens of `{value.name}` in another way than other nodes")
            if rows is not None:
                self._known[value] = rows
            if isinstance(rows, Rows) and math.prod(rows.chunk(shape_of(value), 1)) >= self.classes:
                follow |= {value, *value.users} if value.op == "call_function" else set(value.users)
        return follow

    def _check(self) -> None:
        for node in self.fits:
            if not is_repeatable(node):
                raise Refused(
                    f"`{node.name}` ({node.target}) draws random numbers, writes to an operand or has to run once"
                )
            if node.meta["val"].dtype is torch.float16:
                raise Refused(
                    "the scores are float16, whose gradients are too small without the factor that scales the loss"
                )
            if self.taken is not None:
                self._check_taken(node)

    def _check_taken(self, node: fx.Node) -> None:
        """Checks that nothing depends on tokens that are not taken, and that nothing outside gives these a gradient."""
        reads_all = any(self.has_all(operand) for operand in self.fits[node].operands)
        is_read = any(user not in self.fits for user in node.users)
        if node not in self.learns:
            if (self.has_all(node) and is_read) or (reads_all and isinstance(self.fits[node].result, Sum)):
                raise Refused(f"`{node.name}` has the scores of tokens that the loss does not read")
        elif (self.has_all(node) or reads_all) and any(
            operand in self.learns and operand not in self.fits for operand in node.all_input_nodes
        ):
            raise Refused(f"`{node.name}` has gradients of tokens that the loss does not read")

    def has_all(self, node: fx.Node) -> bool:
        """Returns true if a value has rows for all tokens, not only for those that are taken."""
        rows = self.rows.get(node)
        return self.taken is not None and rows is not None and math.prod(rows.of(shape_of(node))) != self.tokens

    def outputs(self) -> list[fx.Node]:
        """Returns the nodes whose results are read outside."""
        return [node for node in self.fits if any(user not in self.fits for user in node.users)]


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns these nodes and all that depend on them."""
    stack = list(nodes)
    found = set(stack)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


class Rewriting:
    """Writes a graph again, with a region in chunks."""

    def __init__(self, source: fx.Graph, region: Region, chunks: int) -> None:
        self.graph = fx.Graph()
        self._region = region
        self._chunks = chunks
        self._chunk: int | None = None
        """The chunk that is being written; nodes are marked with it, so that no compiler fuses kernels of different chunks."""
        self._written: dict[fx.Node, fx.Node] = {}
        self._with_one: dict[fx.Node, fx.Node] = {}
        """Nodes that depend on the gradient of the loss, as they are where it is 1."""
        self._mode = detect_fake_mode([node.meta.get("val") for node in source.find_nodes(op="placeholder")])
        for node in source.nodes:
            if node.op == "placeholder":
                self._read(node)
        for node in source.nodes:
            # Views are written where they are read.
            if node not in region.fits and (node.op != "call_function" or not _is_light(node)):
                self._read(node)
        self.graph.lint()

    def _read(self, node: fx.Node) -> fx.Node:
        """Returns a node of the new graph, written when it is read first."""
        if node in self._written:
            return self._written[node]
        if node not in self._region.fits:
            for operand in node.all_input_nodes:
                self._read(operand)
            self._written[node] = self.graph.node_copy(node, self._read)
            return self._written[node]
        if node not in self._with_one:
            self._write_region()
        found = self._with_one[node]
        if node in self._region.learns:
            found = self._call(aten.mul.Tensor, (found, self._read(self._region.tangent)), {}, node)
        self._written[node] = found
        return found

    def _read_with_one(self, node: fx.Node) -> fx.Node:
        """Returns what the region reads of a node."""
        if node not in self._region.learns:
            return self._read(node)
        if node not in self._with_one:
            value = node.meta["val"]
            if node is self._region.tangent:
                kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                self._with_one[node] = self._call(aten.full.default, ([], 1.0), kwargs, node)
            else:
                operands = {operand: self._read_with_one(operand) for operand in node.all_input_nodes}
                self._with_one[node] = self.graph.node_copy(node, operands.__getitem__)
        return self._with_one[node]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of: fx.Node) -> fx.Node:
        """Writes a call in place of a node of the old graph."""
        new = self.graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            new.meta = {k: v for k, v in of.meta.items() if k not in ("tensor_meta", "partitioner_tag")}
            new.meta["val"] = target(*values, **named)
        if self._chunk is not None:
            new.meta["chunk"] = self._chunk
        return new

    def _view(self, node: fx.Node, shape: list[int], of: fx.Node) -> fx.Node:
        """Writes a view, with a copy before it where the layout has none."""
        if list(node.meta["val"].shape) == shape:
            return node
        try:
            return self._call(aten.view.default, (node, shape), {}, of)
        except (RuntimeError, ValueError):
            self.graph.erase_node(next(iter(reversed(self.graph.nodes))))
        copy = self._call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, of)
        return self._call(aten.view.default, (copy, shape), {}, of)

    def _write_region(self) -> None:
        region = self._region
        whole: dict[fx.Node, fx.Node] = {}
        for found in region.fits.values():
            for operand, rows in found.operands.items():
                if operand not in region.fits and operand not in whole:
                    new = self._read_with_one(operand)
                    whole[operand] = new if rows is None else self._tokens(new, rows, operand)
        sums: dict[fx.Node, fx.Node] = {}
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.outputs()}
        for chunk in range(self._chunks):
            self._chunk = chunk
            start, end = (i * region.tokens // self._chunks for i in (chunk, chunk + 1))
            written: dict[fx.Node, fx.Node] = {}
            for operand, new in whole.items():
                if (rows := region.rows.get(operand)) is not None:
                    written[operand] = self._call(aten.slice.Tensor, (new, rows.first, start, end), {}, operand)
            for node, found in region.fits.items():
                self._write_chunk(node, found, end - start, whole | written, written, sums)
            for node, chunks in parts.items():
                if node not in sums:
                    chunks.append(written[node])
        self._chunk = None
        for node, chunks in parts.items():
            self._with_one[node] = self._joined(node, chunks, sums.get(node))

    def _tokens(self, new: fx.Node, rows: Rows, operand: fx.Node) -> fx.Node:
        """Returns an operand with one axis for the tokens that pass through the region."""
        shape = shape_of(operand)
        if self._region.has_all(operand):
            taken = self._region.taken
            assert taken is not None
            axis = rows.first + taken.axis
            new = self._view(new, [*shape[: rows.first], *taken.before, *shape[rows.end :]], operand)
            end = taken.start + taken.after[taken.axis]
            new = self._call(aten.slice.Tensor, (new, axis, taken.start, end), {}, operand)
        return self._view(new, rows.chunk(shape, self._region.tokens), operand)

    def _write_chunk(
        self,
        node: fx.Node,
        found: Fit,
        size: int,
        operands: dict[fx.Node, fx.Node],
        written: dict[fx.Node, fx.Node],
        sums: dict[fx.Node, fx.Node],
    ) -> None:
        read = dict(operands)
        for operand, shape in found.views.items():
            read[operand] = self._view(read[operand], shape, operand)
        target, args, kwargs = found.call(size)
        args, kwargs = fx.node.map_arg((args, kwargs), read.__getitem__)
        if target is aten.view.default:
            written[node] = self._view(args[0], args[1], node)
        elif not isinstance(found.result, Sum):
            written[node] = self._call(target, args, kwargs, node)
        elif found.result.is_product and node in sums and sums[node].meta["val"].dtype is node.meta["val"].dtype:
            sums[node] = self._added(aten.addmm.default, (sums[node], *args), node)
        else:
            term = self._call(target, args, kwargs, node)
            if node in sums:
                sums[node] = self._added(aten.add.Tensor, (sums[node], term), node)
            elif term.meta["val"].dtype in HALVES:
                sums[node] = self._call(torch.ops.prims.convert_element_type.default, (term, torch.float32), {}, node)
            else:
                sums[node] = term

    def _added(self, target: Any, args: tuple[Any, ...], node: fx.Node) -> fx.Node:
        new = self._call(target, args, {}, node)
        assert target in IN_PLACE
        new.meta["in_place"] = True
        return new

    def _joined(self, node: fx.Node, chunks: list[fx.Node], total: fx.Node | None) -> fx.Node:
        """Returns the result of a node for all tokens."""
        rows = self._region.rows.get(node)
        if rows is not None:
            total = self._call(aten.cat.default, (chunks, rows.first), {}, node)
            if self._region.has_all(node):
                total = self._padded(total, rows, node)
        assert total is not None
        dtype = node.meta["val"].dtype
        if total.meta["val"].dtype is not dtype:
            total = self._call(torch.ops.prims.convert_element_type.default, (total, dtype), {}, node)
        return self._view(total, shape_of(node), node)

    def _padded(self, part: fx.Node, rows: Rows, node: fx.Node) -> fx.Node:
        """Returns gradients with zeros for the tokens that are not taken."""
        taken, shape = self._region.taken, shape_of(node)
        assert taken is not None
        part = self._view(part, [*shape[: rows.first], *taken.after, *shape[rows.end :]], node)
        after = len(part.meta["val"].shape) - 1 - rows.first - taken.axis
        missing = taken.before[taken.axis] - taken.start - taken.after[taken.axis]
        return self._call(aten.constant_pad_nd.default, (part, [0, 0] * after + [taken.start, missing], 0.0), {}, node)


def _is_light(node: fx.Node) -> bool:
    """Returns true for a node that computes nothing."""
    schema = schema_of(node)
    return schema is not None and not schema.is_mutable and all(r.alias_info is not None for r in schema.returns)
