"""How ops of a joint graph treat rows, so that a region of it can run for some rows at a time.

Rows are axes of a tensor that an op leaves alone: it computes each row from the same row of its operands, or adds up over all
rows. A chunk of a tensor has one axis in place of the axes of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ckpt_opt.joint import is_pointwise

HALVES = (torch.float16, torch.bfloat16)


class Refused(Exception):
    """A region cannot be cut along rows; the message is for people."""


@dataclass(frozen=True)
class Rows:
    """The axes of a tensor that are rows: `count` axes, of which the first is `first`."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """Returns the axis after the last one."""
        return self.first + self.count

    def of(self, shape: Sequence[int]) -> list[int]:
        """Returns the sizes of these axes."""
        return list(shape[self.first : self.end])

    def chunk(self, shape: Sequence[int], size: int) -> list[int]:
        """Returns the shape of a chunk of so many rows."""
        return [*shape[: self.first], size, *shape[self.end :]]

    def axis(self, axis: int) -> int:
        """Returns where an axis that is not among these is in a chunk."""
        return axis if axis < self.first else axis - self.count + 1


@dataclass(frozen=True)
class Sum:
    """A result that is a sum over the rows: that of a chunk is a term."""

    is_product: bool = False
    """The term is the product of two matrices, along the rows."""


@dataclass(frozen=True)
class Taken:
    """A slice of the tokens."""

    before: tuple[int, ...]
    """The sizes of the tokens' axes before it."""
    after: tuple[int, ...]
    axis: int
    """The one of them that is sliced."""
    start: int


Known = Mapping[fx.Node, Rows | Sum]


@dataclass
class Fit:
    """How a node treats rows."""

    operands: dict[fx.Node, Rows | None]
    """The rows of each operand; `None` for one that all rows read whole."""
    result: Rows | Sum
    call: Callable[[int], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    """Returns op and arguments for a chunk of so many rows, with operands as in the whole graph."""
    views: dict[fx.Node, list[int]] = field(default_factory=dict)
    """Shapes that operands without rows need beside chunks."""
    taken: Taken | None = None
    """The node takes some of the tokens, or puts them back among zeros: a chunk has only those that are taken."""


def fit(node: fx.Node, known: Known) -> Fit:
    """Returns how a node treats rows, where those of its result or of an operand are known.

    Raises:
        Refused: Chunks of rows cannot pass through the node.
    """
    if any(isinstance(known.get(operand), Sum) for operand in node.all_input_nodes):
        raise Refused(f"`{node.name}` reads a sum over all tokens")
    if not isinstance(node.meta.get("val"), torch.Tensor):
        raise Refused(f"`{node.name}` ({node.target}) has several results")
    rule = RULES.get(str(getattr(node.target, "_overloadpacket", node.target)))
    if rule is None and is_pointwise(node):
        rule = pointwise
    if rule is None:
        raise Refused(
            f"`{node.name}` ({node.target}) is an op of which it is not known that it treats tokens one by one"
        )
    return rule(node, known)


def shape_of(node: fx.Node) -> list[int]:
    """Returns the shape of a node's result."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Refused(f"`{node.name}` is no tensor")
    return list(value.shape)


def rows_of(node: fx.Node, known: Known) -> Rows | None:
    """Returns the rows of a node's result, if they are known."""
    rows = known.get(node)
    return rows if isinstance(rows, Rows) else None


def replaced(node: fx.Node, changes: dict[int, Any]) -> Callable[[int], tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Returns a call with other arguments at some places, whatever the number of rows is."""
    args = tuple(changes.get(i, argument) for i, argument in enumerate(node.args))
    return lambda _: (node.target, args, dict(node.kwargs))


def broadcast(node: fx.Node, operands: Sequence[fx.Node], known: Known) -> Fit:
    """Returns the fit of a node whose operands are broadcast to its result."""
    out = shape_of(node)
    rows = rows_of(node, known)
    for operand in operands:
        if rows is None and (given := rows_of(operand, known)) is not None:
            rows = Rows(given.first + len(out) - len(shape_of(operand)), given.count)
    if rows is None:
        raise Refused(f"the rows of `{node.name}` are not known")
    found = Fit({}, rows, replaced(node, {}))
    for operand in operands:
        shape = shape_of(operand)
        missing = len(out) - len(shape)
        padded = [1] * missing + shape
        if rows.of(padded) == rows.of(out):
            first = max(rows.first - missing, 0)
            found.operands[operand] = Rows(first, rows.end - missing - first)
        elif set(rows.of(padded)) == {1}:
            found.operands[operand] = None
            if rows.count > 1 and rows.end > missing:
                found.views[operand] = rows.chunk(padded, 1)[min(missing, rows.first) :]
        else:
            raise Refused(f"`{node.name}` repeats `{operand.name}` along some of the tokens' axes")
    return found


def pointwise(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of an op that computes each element from those at the same place."""
    return broadcast(node, node.all_input_nodes, known)


def expand(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of an op that repeats its operand."""
    found = broadcast(node, node.all_input_nodes, known)
    out, rows = shape_of(node), found.result
    assert isinstance(rows, Rows)
    found.call = lambda size: (node.target, (node.args[0], rows.chunk(out, size)), {})
    return found


def full(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of an op that makes a tensor of equal elements."""
    out, rows = shape_of(node), rows_of(node, known)
    if rows is None:
        raise Refused(f"the rows of `{node.name}` are not known")
    return Fit({}, rows, lambda size: (node.target, (rows.chunk(out, size), *node.args[1:]), dict(node.kwargs)))


def regrouped(rows: Rows, source: Sequence[int], target: Sequence[int], name: str) -> Rows:
    """Returns the axes that rows become in a view of another shape."""
    before, total = math.prod(source[: rows.first]), math.prod(rows.of(source))
    for first in range(len(target)):
        for end in range(first + 1, len(target) + 1):
            if math.prod(target[:first]) == before and math.prod(target[first:end]) == total:
                return Rows(first, end - first)
    raise Refused(f"`{name}` makes a view in which tokens are no axes of their own")


def view(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of an op that gives its operand another shape."""
    (operand,) = node.all_input_nodes
    source, target = shape_of(operand), shape_of(node)
    rows = rows_of(operand, known)
    result = rows_of(node, known) or regrouped(rows or Rows(0, 1), source, target, node.name)
    rows = rows or regrouped(result, target, source, node.name)
    return Fit(
        {operand: rows},
        result,
        lambda size: (torch.ops.aten.view.default, (operand, result.chunk(target, size)), {}),
    )


def permute(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of an op that changes the order of axes."""
    (operand,) = node.all_input_nodes
    order = list(range(len(shape_of(operand))))
    if isinstance(node.args[1:], tuple) and len(node.args) == 2:
        order = [int(axis) % len(order) for axis in node.args[1]]
    else:
        one, other = node.args[1:] or (0, 1)
        order[int(one)], order[int(other)] = order[int(other)], order[int(one)]
    rows, result = rows_of(operand, known), rows_of(node, known)
    if rows is None:
        assert result is not None
        rows = Rows(order[result.first], result.count)
    places = [place for place, axis in enumerate(order) if rows.first <= axis < rows.end]
    result = Rows(places[0], rows.count)
    if [order[place] for place in range(result.first, result.end)] != list(range(rows.first, rows.end)):
        raise Refused(f"`{node.name}` puts other axes between those of the tokens")
    kept = [rows.axis(axis) for axis in order if axis == rows.first or not rows.first <= axis < rows.end]
    return Fit({operand: rows}, result, lambda _: (torch.ops.aten.permute.default, (operand, kept), {}))


def reduce(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of an op that reduces some axes, or all."""
    (operand,) = node.all_input_nodes
    shape = shape_of(operand)
    given = node.args[1] if len(node.args) > 1 else None
    axes = [given] if isinstance(given, int) else list(given or range(len(shape)))
    dims = {int(axis) % len(shape) for axis in axes}
    keeps = len(node.args) > 2 and bool(node.args[2])
    rows = rows_of(operand, known)
    if rows is None:
        result = rows_of(node, known)
        assert result is not None
        kept = [axis for axis in range(len(shape)) if keeps or axis not in dims]
        rows = Rows(kept[result.first], result.count)
    own = set(range(rows.first, rows.end))
    if not dims & own:
        moved = [rows.axis(axis) for axis in sorted(dims)]
        before = 0 if keeps else sum(axis < rows.first for axis in dims)
        call = replaced(node, {1: moved[0] if isinstance(given, int) else moved})
        return Fit({operand: rows}, Rows(rows.first - before, rows.count), call)
    if not own <= dims or str(node.target).split(".")[1] != "sum":
        raise Refused(f"`{node.name}` ({node.target}) reduces tokens otherwise than by a sum")
    moved = sorted({rows.axis(axis) for axis in dims - own} | {rows.first})
    # Terms of 16-bit numbers are not rounded before they are added.
    kwargs = dict(node.kwargs) | ({"dtype": torch.float32} if node.meta["val"].dtype in HALVES else {})
    return Fit({operand: rows}, Sum(), lambda _: (torch.ops.aten.sum.dim_IntList, (operand, moved, keeps), kwargs))


def product(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of a product of matrices, of rows or along them."""
    *bias, left, right = node.all_input_nodes if len(node.all_input_nodes) == len(node.args) else [None] * 3
    if left is None or right is None:
        raise Refused(f"`{node.name}` multiplies a matrix by itself")
    row, column = Rows(0, 1), Rows(1, 1)
    if rows_of(node, known) == row or rows_of(left, known) == row:
        if rows_of(right, known) is not None:
            raise Refused(f"`{node.name}` multiplies tokens by tokens")
        found = Fit({left: row, right: None}, row, replaced(node, {}))
        for addend in bias:
            assert addend is not None
            whole = len(shape_of(addend)) < 2 or shape_of(addend)[0] == 1
            found.operands[addend] = None if whole else row
        return found
    if bias or rows_of(node, known) is not None:
        raise Refused(f"`{node.name}` has tokens in its columns")
    return Fit({left: column, right: row}, Sum(is_product=True), replaced(node, {}))


def along(place: int) -> Callable[[fx.Node, Known], Fit]:
    """Returns the rule of ops that work along an axis, the argument at this place, and whose operands have as many axes."""

    def rule(node: fx.Node, known: Known) -> Fit:
        out = shape_of(node)
        rows = next((r for n in (node, *node.all_input_nodes) if (r := rows_of(n, known)) is not None), None)
        axis = int(node.args[place]) % len(out)
        if rows is None or rows.first <= axis < rows.end:
            raise Refused(f"`{node.name}` ({node.target}) works along the tokens")
        for operand in node.all_input_nodes:
            if rows.of(shape_of(operand)) != rows.of(out):
                raise Refused(f"`{node.name}` reads `{operand.name}`, which has other tokens")
        return Fit(dict.fromkeys(node.all_input_nodes, rows), rows, replaced(node, {place: rows.axis(axis)}))

    return rule


def taken(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of a slice, of its gradient, or of what writes a slice among zeros."""
    is_slice = node.target is torch.ops.aten.slice.Tensor
    place = 1 if is_slice else 2
    operand = node.args[1 if node.target is torch.ops.aten.slice_scatter.default else 0]
    rows = rows_of(operand, known) or rows_of(node, known)
    shape, out = shape_of(operand), shape_of(node)
    axis = int(node.args[place]) % len(out) if len(node.args) > place else 0
    if rows is None or not rows.first <= axis < rows.end:
        return along(place)(node, known)
    zeros = node.args[0]
    if zeros is not operand and (zeros.target is not torch.ops.aten.full.default or zeros.args[1] != 0):
        raise Refused(f"`{node.name}` writes tokens among others")
    whole, part = (shape, out) if is_slice else (out, shape)
    given = [*node.args[place + 1 :], *[None, None, None, None]]
    start, step = int(given[0] or 0), int(given[2] or 1)
    if step != 1:
        raise Refused(f"`{node.name}` takes some tokens of a sequence only")
    start = min(max(start + whole[axis] if start < 0 else start, 0), whole[axis])
    return Fit(
        {operand: rows},
        rows,
        lambda size: (torch.ops.aten.view.default, (operand, rows.chunk(out, size)), {}),
        taken=Taken(tuple(rows.of(whole)), tuple(rows.of(part)), axis - rows.first, start),
    )


def loss_gradient(node: fx.Node, known: Known) -> Fit:
    """Returns the fit of the gradient of a negative log likelihood."""
    gradient, scores, labels, weights, *_, total = node.args
    row = Rows(0, 1)
    if not all(isinstance(n, fx.Node) for n in (gradient, scores, labels, total)) or len(shape_of(node)) != 2:
        raise Refused(f"`{node.name}` has another form")
    assert isinstance(gradient, fx.Node)
    operands: dict[fx.Node, Rows | None] = {gradient: row if shape_of(gradient) else None}
    operands |= {n: row for n in (scores, labels) if isinstance(n, fx.Node)}
    operands |= {n: None for n in (weights, total) if isinstance(n, fx.Node)}
    return Fit(operands, row, replaced(node, {}))


RULES: dict[str, Callable[[fx.Node, Known], Fit]] = (
    dict.fromkeys(
        [f"aten.{op}" for op in ("_to_copy", "alias", "detach", "full_like", "lift_fresh_copy", "masked_fill")]
        + [f"aten.{op}_like" for op in ("ones", "zeros")],
        pointwise,
    )
    | dict.fromkeys([f"aten.{op}" for op in ("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view")], view)
    | dict.fromkeys([f"aten.{op}" for op in ("permute", "t", "transpose")], permute)
    | dict.fromkeys([f"aten.{op}" for op in ("amax", "amin", "argmax", "logsumexp", "mean", "sum")], reduce)
    | dict.fromkeys(["aten.mm", "aten.addmm"], product)
    | dict.fromkeys([f"aten.{op}" for op in ("_log_softmax", "_softmax", "gather", "scatter", "scatter_add")], along(1))
    | dict.fromkeys([f"aten.{op}_backward_data" for op in ("_log_softmax", "_softmax")], along(2))
    | dict.fromkeys([f"aten.{op}" for op in ("slice", "slice_backward", "slice_scatter")], taken)
    | {"aten.expand": expand, "aten.full": full, "aten.nll_loss_backward": loss_gradient}
)
"""Rules by op, for those that PyTorch does not mark as pointwise."""
