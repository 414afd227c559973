"""The ways into `torch.compile` and AOTAutograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ckpt_opt.inductor import compile_fused
from ckpt_opt.partition import Options, Partitioner
from ckpt_opt.planner import Plan, PlanWarning

INNER = ("inductor", "aot_eager")


def partitioner(budget: int | str | None = None, **options: Any) -> Partitioner:
    """Returns a `partition_fn` for `torch._functorch.aot_autograd`; the arguments are those of `backend`."""
    return Partitioner(Options(budget, **options))


def backend(
    budget: int | str | None = None,
    inner: str = "inductor",
    objective: str = "cost",
    effort: str = "normal",
    measure: bool | None = None,
    on_infeasible: str = "raise",
    reserve: int | str = 0,
    report: str | Path | None = None,
    policy: str | None = None,
    offload: str = "none",
    tile_loss: int | str | None = None,
) -> Callable[..., Any]:
    """Returns a backend for `torch.compile` that trains within a memory budget.

    Args:
        budget: The largest peak of a step: bytes, `'6GiB'`, or `'60%'` of what the unplanned step takes above parameters and
            inputs. It holds parameters, buffers, inputs, activations and gradients; not the states of an optimizer. Where a
            model breaks into several graphs, bytes are for all of them together, and a share applies to each.
        inner: `'inductor'` compiles each pass. `'aot_eager'` runs op by op: gradients are bit for bit those of eager
            PyTorch.
        objective: What a plan within the budget minimizes: `'cost'` (time) or `'flops'`.
        effort: How long to search: `'first'`, `'normal'` or `'thorough'`, which also goes on to prove how good a plan is.
        measure: Take times of ops by running each once; else from a model of the device. By default with `'aot_eager'`.
        on_infeasible: What to do if no plan fits: `'raise'` a `BudgetError`, or warn and plan for the `'smallest'` peak.
        reserve: Bytes of the budget that are left to others: the states of an optimizer, or parameters and gradients of graphs
            that follow this one.
        policy: A rule instead of a budget: `'none'`, `'selective'`, `'full'` (every layer is recomputed) or `'group:N'` (N layers
            at a time). Layers are the numbered modules, such as those of a `ModuleList`.
        offload: What results leave the device's memory for that of the host until the backward pass reads them: `'none'`, `'auto'`
            (what costs less than to recompute; needs a budget) or `'cpu'` (all that may). On a CPU they go to a file.
        tile_loss: Compute head and loss for so many chunks of the tokens, one after the other, so that the scores of all tokens for
            all classes never exist at once; `'auto'`: so many that the scores of a chunk are about as large as what they are
            computed from. The loss has to be computed in the compiled function, and be all that it returns of the scores.
        report: The page `plan.html` to write when a graph is planned; `plan-2.html` for a second graph, and so on.

    Raises:
        ValueError: An argument is none of the above, or a policy needs layers and finds none.

    While a step runs, a `BudgetError` says that several compiled graphs, or several calls of one, exceed the budget together.
    """
    if inner not in INNER:
        raise ValueError(f"inner: expected one of {', '.join(INNER)}, found {inner!r}")
    page = None if report is None else Path(report)
    if page is not None and page.suffix != ".html":
        raise ValueError(f"report: expected a name that ends in .html, found {str(report)!r}")
    reported = 0
    fused = inner == "inductor"
    measure = not fused if measure is None else measure
    partition = partitioner(
        budget,
        policy=policy,
        objective=objective,
        effort=effort,
        measure=measure,
        fused=fused,
        on_infeasible=on_infeasible,
        reserve=reserve,
        offload=offload,
        tile_loss=tile_loss,
    )

    def compile_graph(module: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        nonlocal reported
        if fused:
            compiled, plan = compile_fused(partition, module, inputs, kwargs)
        else:
            compiled, plan = compile_plain(partition, module, inputs)
        if plan is not None:
            if page is not None:
                reported += 1
                plan.html(page if reported == 1 else page.with_stem(f"{page.stem}-{reported}"))
            return partition.running.watched(compiled, plan)
        if torch.is_grad_enabled() and learns(module, inputs):
            warnings.warn(
                "nothing was planned for this graph, though its parameters have gradients: it runs as PyTorch compiles it",
                PlanWarning,
                stacklevel=2,
            )
        return compiled

    return compile_graph


def compile_plain(
    partition: Partitioner, module: fx.GraphModule, inputs: list[Any]
) -> tuple[Callable[..., Any], Plan | None]:
    """Compiles a graph that runs op by op; returns the function, and the plan if there is one."""
    from torch._dynamo.backends.common import aot_autograd

    before = len(partition.plans)
    compiler = aot_autograd(
        fw_compiler=op_by_op, bw_compiler=op_by_op, partition_fn=partition, keep_inference_input_mutations=True
    )
    compiled = compiler(module, inputs)
    return compiled, partition.plans[-1] if len(partition.plans) > before else None


def op_by_op(graph: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Returns a function that runs a graph and frees each value after it was last read."""
    from torch._dynamo.backends.debugging import boxed_nop

    if hasattr(fx.graph, "_BoxedCodeGen"):
        compiled: Callable[[list[Any]], Any] = boxed_nop(graph, inputs)
        return compiled
    # PyTorch 2.9 interprets the graph, and keeps what nothing reads until the end.
    unread = [node for node in graph.graph.nodes if not node.users and node.op != "output"]

    def run(arguments: list[Any]) -> Any:
        interpreter = fx.Interpreter(graph)
        for node in unread:
            interpreter.user_to_last_uses.setdefault(node, []).append(node)
        return interpreter.boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def learns(module: fx.GraphModule, inputs: list[Any]) -> bool:
    """Returns true if a gradient can flow into parameters or inputs of a graph."""
    tensors = [*module.parameters(), *(value for value in inputs if isinstance(value, torch.Tensor))]
    return any(tensor.requires_grad for tensor in tensors)
