"""What needs a model but no compiler: a plan by itself, files for the command line, and a mark that ONNX has no op for."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors

from ckpt_opt.backends import partitioner
from ckpt_opt.planner import Plan


def plan_module(
    model: nn.Module,
    *inputs: Any,
    budget: int | str | None = None,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> Plan:
    """Plans a training step of a model without compiling or running it.

    Args:
        model: The model. Its forward pass is traced with sizes only, and must be one graph.
        inputs: What the model is called with; only types and sizes matter.
        budget: As of `backend`. A policy by layers finds none here: layers are known where a model is compiled.
        kwargs: Named arguments of the model.
        loss: What is differentiated, from the model's result; the results themselves if not given.
        options: More arguments of `backend`, but for `inner`.

    Returns:
        The plan, with names of ops in the joint graph of forward and backward pass.

    Raises:
        BudgetError: No plan fits into the budget.
        ValueError: Nothing of the model has a gradient.
    """
    partition = partitioner(budget, **options)
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, with_loss(model, loss), inputs, kwargs)
        if "partition_fn" in inspect.signature(aot_compile_joint_with_descriptors).parameters:
            aot_compile_joint_with_descriptors(joint, partition_fn=partition)
        else:
            # PyTorch 2.9 takes it from the options of the trace only.
            joint._aot_state.aot_config.partition_fn = partition
            aot_compile_joint_with_descriptors(joint)
    if not partition.plans:
        raise ValueError("no result of the model has a gradient, so there is no backward pass to plan")
    return partition.plans[-1]


def export(
    model: nn.Module,
    inputs: tuple[Any, ...],
    path: str | Path,
    *,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    dynamic: dict[str, dict[int, str]] | None = None,
) -> Path:
    """Writes a model, in the mode that it is in, to a file that the command `ckpt-opt` takes.

    Args:
        model: The model.
        inputs: Arguments to trace it with.
        path: The file; its name ends in `.pt2`.
        kwargs: Named arguments to trace it with.
        loss: Computes a scalar from the model's result, and becomes the only output.
        dynamic: Sizes that may differ later, by the name of the argument and the dimension: `{"ids": {0: "batch"}}`. Equal names
            are equal sizes.

    Returns:
        The file.

    Raises:
        ValueError: The name does not end in `.pt2`.
    """
    target = Path(path)
    if target.suffix != ".pt2":
        raise ValueError(f"path: expected a name that ends in .pt2, found {str(path)!r}")
    names = {name for sizes in (dynamic or {}).values() for name in sizes.values()}
    dims = {name: torch.export.Dim(name) for name in sorted(names)}
    shapes = None
    if dynamic is not None:
        arguments = [*_argument_names(model)[: len(inputs)], *(kwargs or {})]
        unknown = sorted(dynamic.keys() - set(arguments))
        if unknown:
            raise ValueError(
                f"dynamic: expected names of arguments ({', '.join(arguments)}), found {', '.join(unknown)}"
            )
        shapes = {name: {at: dims[d] for at, d in dynamic.get(name, {}).items()} or None for name in arguments}
    program = torch.export.export(with_loss(model, loss), inputs, kwargs, dynamic_shapes=shapes, strict=False)
    torch.export.save(
        program, target, extra_files={"ckpt_opt.json": json.dumps({"sizes": size_names(program, dynamic or {})})}
    )
    return target


def size_names(program: torch.export.ExportedProgram, dynamic: dict[str, dict[int, str]]) -> dict[str, str]:
    """Returns the names that the user gave to sizes, by those of the program, which a file does not say otherwise."""
    found = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for at, name in dynamic.get(node.name, {}).items():
            if isinstance(value, torch.Tensor) and isinstance(value.shape[at], torch.SymInt):
                symbol = value.shape[at].node.expr
                if symbol.is_Symbol:
                    found[str(symbol)] = name
    return found


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns `x.detach()`, in a form that an ONNX export keeps; ONNX itself has no op for it."""
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic("ckpt::StopGradient", (x,), dtype=x.dtype, shape=x.shape, version=1)
    return x.detach()


def with_loss(model: nn.Module, loss: Callable[..., torch.Tensor] | None) -> nn.Module:
    """Returns the model with its loss in place of its result. Parameters are shared and keep their names."""
    if loss is None:
        return model
    forward = model.forward

    @functools.wraps(forward)
    def composed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(forward(*args, **kwargs))

    whole = copy.copy(model)
    whole.forward = composed
    return whole


def _argument_names(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)
