"""The ways into `torch.compile` and AOTAutograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ckpt_opt.partition import Options, Partitioner
from ckpt_opt.planner import PlanWarning

INNER = ("inductor", "aot_eager")


def partitioner(budget: int | str, **options: Any) -> Partitioner:
    """Returns a `partition_fn` for `torch._functorch.aot_autograd`; the arguments are those of `backend`."""
    return Partitioner(Options(budget, **options))


def backend(
    budget: int | str,
    inner: str = "inductor",
    objective: str = "cost",
    effort: str = "normal",
    measure: bool | None = None,
    on_infeasible: str = "raise",
) -> Callable[..., Any]:
    """Returns a backend for `torch.compile` that trains within a memory budget.

    Args:
        budget: The largest peak of a step: bytes, `'6GiB'`, or `'60%'` of what the unplanned step takes above parameters and
            inputs. It holds parameters, buffers, inputs, activations and gradients; not the states of an optimizer. Where a
            model breaks into several graphs, bytes are for all of them together, and a share applies to each. Where PyTorch
            compiles one graph that several layers call, as after a break within a loop over layers, the budget holds for one
            call: `fullgraph=True` shows such breaks.
        inner: `'inductor'` compiles each pass. `'aot_eager'` runs op by op: gradients are bit for bit those of eager
            PyTorch, and the peak is the predicted one.
        objective: What a plan within the budget minimizes: `'cost'` (time) or `'flops'`.
        effort: How long to search: `'first'`, `'normal'` or `'thorough'`.
        measure: Take times of ops by running each once; else from a model of the device. By default with `'aot_eager'`.
        on_infeasible: What to do if no plan fits: `'raise'` a `BudgetError`, or warn and plan for the `'smallest'` peak.

    Raises:
        ValueError: An argument is none of the above.
    """
    if inner not in INNER:
        raise ValueError(f"inner: expected one of {', '.join(INNER)}, found {inner!r}")
    fused = inner == "inductor"
    measure = not fused if measure is None else measure
    partition = partitioner(
        budget, objective=objective, effort=effort, measure=measure, fused=fused, on_infeasible=on_infeasible
    )

    def compile_graph(module: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        before = len(partition.plans)
        compiled = (
            compile_fused(partition, module, inputs, kwargs) if fused else compile_plain(partition, module, inputs)
        )
        if torch.is_grad_enabled() and len(partition.plans) == before and learns(module, inputs) and not fused:
            warnings.warn(
                "nothing was planned for this graph, though its parameters have gradients: it runs as PyTorch compiles it",
                PlanWarning,
                stacklevel=2,
            )
        return compiled

    return compile_graph


def compile_plain(partition: Partitioner, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles a graph that runs op by op."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return compiler(module, inputs)


def compile_fused(
    partition: Partitioner, module: fx.GraphModule, inputs: list[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a graph by inductor."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(custom_partitioner_fn=InductorPartitioner(partition)):
        return compile_fx(module, inputs, **options)


class InductorPartitioner(CustomPartitionerFn):
    """The form in which inductor takes a partitioner, with what its caches need to know of it."""

    def __init__(self, partition: Partitioner) -> None:
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits a joint graph."""
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Returns what compiled code depends on besides the graph."""
        return self._partition.key()

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # Caches pickle the configuration to hash it.
        return str, (self.uuid(),)


def learns(module: fx.GraphModule, inputs: list[Any]) -> bool:
    """Returns true if a gradient can flow into parameters or inputs of a graph."""
    tensors = [*module.parameters(), *(value for value in inputs if isinstance(value, torch.Tensor))]
    return any(tensor.requires_grad for tensor in tensors)
