"""Lets the forward pass save masks as bytes, where inductor compiles for a CPU.

Inductor's kernels write booleans one at a time, but bytes with vector instructions. Writing a dropout mask as booleans takes longer
than drawing it. A byte takes as much memory as a boolean.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode

from ckpt_opt.joint import is_pointwise, is_view


def save_as_bytes(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """Changes the masks that the forward pass saves to bytes, and lets the backward pass make masks of them again.

    Args:
        forward: The forward pass. Its results are `forward_outputs` of the user's, then the tensors and sizes that it saves.
        backward: The backward pass. It takes these sizes and tensors first, and may know them by other names.
        forward_outputs: The number of the user's results.
    """
    output = forward.graph.output_node()
    results: list[Any] = list(output.args[0])
    saved = [node for node in results[forward_outputs:] if isinstance(node.meta["val"], torch.Tensor)]
    sizes = len(results) - forward_outputs - len(saved)
    taken = backward.graph.find_nodes(op="placeholder")[sizes : sizes + len(saved)]
    for mask, read in zip(saved, taken, strict=True):
        if not read.users or not is_fused_mask(mask) or mask in results[:forward_outputs]:
            continue
        with forward.graph.inserting_after(mask):
            as_float = convert(mask, torch.float32)
        with forward.graph.inserting_after(as_float):
            as_byte = convert(as_float, torch.uint8)
        results[results.index(mask)] = as_byte
        read.meta = described(read, as_byte.meta["val"])
        users = dict(read.users)
        with backward.graph.inserting_before(next(node for node in backward.graph.nodes if node in users)):
            read_as_float = convert(read, torch.float32)
            again = backward.graph.call_function(torch.ops.aten.ne.Scalar, (read_as_float, 0))
        again.meta = dict(mask.meta)
        for user in users:
            user.replace_input_with(read, again)
    output.args = (tuple(results),)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def is_fused_mask(node: fx.Node) -> bool:
    """Returns true for a mask on a CPU that only fused kernels read, so that booleans need not be written anywhere."""
    value = node.meta["val"]
    return (
        value.dtype is torch.bool
        and value.device.type == "cpu"
        and is_pointwise(node)
        and all(is_pointwise(user) or is_view(user) or user.op == "output" for user in node.users)
    )


def convert(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Writes a conversion. Masks are converted to bytes by way of floats, because a direct conversion is slow, too."""
    value = node.meta["val"]
    new = node.graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    with detect_fake_mode([value]) or nullcontext():
        new.meta = described(node, value.to(dtype))
    return new


def described(node: fx.Node, value: torch.Tensor) -> dict[str, Any]:
    """Returns the metadata of a node for a result of another type."""
    return {key: entry for key, entry in node.meta.items() if key != "tensor_meta"} | {"val": value}
