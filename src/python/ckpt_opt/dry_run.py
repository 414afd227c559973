"""Runs code that inductor has generated, with its memory but without its arithmetic, to know the peak before the first step.

Generated code is Python: it allocates buffers, calls kernels, and deletes names. It runs here with tensors on PyTorch's
`meta` device, which have sizes and no data, and with kernels that do nothing; so each storage is made, shared and freed at
the moment at which it will be in a step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_opt.joint import number, tensors_of

WITHOUT_EFFECT = ("cpp_", "triton_", "assert_")
"""How the names of kernels begin, and of checks of strides, which without data may be others."""

Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Returns the bytes that an op takes while it runs, besides operands and results, from its arguments."""


class Memory(TorchDispatchMode):
    """Knows the bytes of all storages that are alive, and the most that were, while ops run."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._scratch = scratch
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._live = 0
        self._fixed: dict[int, torch.UntypedStorage] = {}

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leaves these tensors out of the count: they are there throughout, or on another device."""
        self._fixed |= {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}

    def count(self, tensors: Iterable[torch.Tensor], scratch: int = 0) -> None:
        """Counts the storages of these tensors that are new."""
        for place, (storage, size) in list(self._known.items()):
            if storage.expired():
                del self._known[place]
                self._live -= size
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in self._fixed:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._live += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live + scratch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and counts what it makes."""
        result = func(*args, **kwargs or {})
        if func is torch.ops.ckpt_opt.offload.default:
            self.hold([result])
        self.count(tensors_of(result), self._scratch(func, args, kwargs or {}))
        return result


class Nothing:
    """A kernel that does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    run = __call__


def dry_run(
    forward: tuple[fx.GraphModule, Any],
    backward: tuple[fx.GraphModule, Any],
    forward_outputs: int,
    saved: int,
    scratch: Scratch,
) -> int:
    """Returns the peak of a step in bytes, without parameters, buffers and inputs.

    Args:
        forward: The forward pass as a graph, and as inductor compiled it.
        backward: The backward pass. It takes sizes, saved tensors, and then gradients of the outputs.
        forward_outputs: So many results of the forward pass are the model's; saved tensors follow, and then sizes.
        saved: The number of saved tensors.
        scratch: What ops take besides operands and results.
    """
    memory = Memory(scratch)
    inputs = [empty(node.meta.get("val")) for node in placeholders(forward[0])]
    memory.hold(value for value in inputs if isinstance(value, torch.Tensor))
    with torch.no_grad(), memory:
        results = list(without_arithmetic(forward[1])(list(inputs)))
        outputs, handed, sizes = (
            results[:forward_outputs],
            results[forward_outputs : forward_outputs + saved],
            results[forward_outputs + saved :],
        )
        del results
        rest = [empty(node.meta.get("val")) for node in placeholders(backward[0])[len(handed) + len(sizes) :]]
        memory.count(value for value in rest if isinstance(value, torch.Tensor))
        arguments = [*sizes, *handed, *rest]
        handed.clear()
        rest.clear()
        gradients = without_arithmetic(backward[1])(arguments)
    del outputs, gradients
    return memory.peak_bytes


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the inputs of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def empty(value: Any) -> Any:
    """Returns a tensor without data in place of each tensor, and a number in place of a symbolic size."""
    if isinstance(value, torch.SymInt):
        return number(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


def without_arithmetic(compiled: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns the function that a compiled graph runs, with kernels that do nothing and buffers without data.

    Raises:
        TypeError: The graph is not compiled to Python code.
    """
    runner = getattr(compiled, "compiled_fn_runner", None)
    if runner is None:
        raise TypeError("inductor compiled the graph to something else than Python code")
    call = type(runner).call
    own = call.__globals__
    names: dict[str, Any] = dict(own)

    def rebound(function: types.FunctionType) -> types.FunctionType:
        return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)

    for name, value in own.items():
        if name.startswith("empty_strided"):
            names[name] = empty_strided
        elif name.startswith(WITHOUT_EFFECT) or (
            hasattr(value, "run") and not isinstance(value, (type, types.ModuleType))
        ):
            names[name] = Nothing()
        elif isinstance(value, types.FunctionType) and value.__globals__ is own:
            names[name] = rebound(value)
    parts = [rebound(part) if getattr(part, "__globals__", None) is own else part for part in runner.partitions]
    return types.MethodType(rebound(call), types.SimpleNamespace(partitions=parts))


def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """Returns a buffer without data."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
