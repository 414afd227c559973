"""Steps that train the packed models through the Python package: bits against the traced graph, memory against the prediction."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tools.cuda import records
from tools.cuda.context import Context
from tools.cuda.training import Peer
from tools.lib.options import ROOT

WAYS: dict[str, dict[str, Any]] = {
    "unplanned": {"policy": "none"},
    "75 % of memory": {"budget": "75%"},
    "smallest": {"budget": "1%"},
    "offloaded": {"policy": "none", "offload": "cpu"},
    "75 %, offloaded": {"budget": "75%", "offload": "auto"},
}
"""Arguments of the backend, op by op."""
TOLERANCE_BYTES = 64


def package(cx: Context) -> Any:
    """Imports the Python package, which takes the kit's binary."""
    os.environ["CKPT_OPT_BIN"] = str(cx.compiler.binary)
    sys.path.insert(0, str(ROOT / "src" / "python"))
    import ckpt_opt

    return ckpt_opt


def op_by_op(model: str) -> Callable[[Context], None]:
    """Returns a step that runs plans op by op: gradients have the bits of the traced graph, and memory is as predicted."""

    def step(cx: Context) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        peer = Peer(cx, model)
        import torch

        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        ckpt_opt = package(cx)
        module = peer.module()
        # transformers builds another mask where it is traced, which PyTorch's attention takes to other kernels.
        expected = compiled(peer, module, "eager")()
        for name, arguments in WAYS.items():
            case = f"{model}, package, {name}"
            backend = ckpt_opt.backend(inner="aot_eager", on_infeasible="smallest", **arguments)
            ours = trained(cx, peer, module, case, backend)()
            differ = sum(not torch.equal(*pair) for pair in zip(ours, expected, strict=True))
            what = f"{case}: gradients have the bits of the traced graph"
            cx.records.condition(what, not differ, f"{differ} of {len(expected)} differ")
            del ours

    return step


def fused(model: str) -> Callable[[Context], None]:
    """Returns a step that compiles by inductor, within the memory that PyTorch's own partitioner took."""

    def step(cx: Context) -> None:
        peer = Peer(cx, model)
        ckpt_opt = package(cx)
        module = peer.module()
        measured = {r["case"]: r.get("requested_bytes") for r in records.read(cx.out) if "case" in r}
        limit = measured.get(f"{model}, PyTorch memory budget")
        case = f"{model}, package, compiled{' within the peak of the memory budget' if limit else ', 75 %'}"
        trained(cx, peer, module, case, ckpt_opt.backend(budget=limit or "75%", on_infeasible="smallest"))

    return step


def compiled(peer: Peer, module: Any, backend: Any) -> Callable[[], tuple[Any, ...]]:
    """Returns a function that computes the gradients of all parameters, of the loss alone."""
    import torch

    torch._dynamo.reset()

    def loss() -> Any:
        return module(input_ids=peer.tokens, labels=peer.tokens).loss

    step = torch.compile(loss, dynamic=False, fullgraph=True, backend=backend)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(step(), parameters)


def trained(cx: Context, peer: Peer, module: Any, case: str, backend: Any) -> Callable[[], tuple[Any, ...]]:
    """Measures a step that a backend compiles, and whether it takes the predicted memory; returns the step."""
    import torch

    ckpt_opt = package(cx)
    ckpt_opt.last_plans.clear()
    step = compiled(peer, module, backend)
    step()
    (plan,) = ckpt_opt.last_plans
    cx.records.add(plan=case, overhead_pct=plan.overhead_pct, peak_bytes=plan.peak_bytes)
    predicted = plan.compiled_peak_bytes or plan.peak_bytes
    others = 0
    if peer.tokens.is_cuda:
        torch.cuda.synchronize()
        others = torch.cuda.memory_stats()["requested_bytes.all.current"] - plan.static_bytes
    found = peer.measured(case, step, predicted_bytes=predicted + others)
    if found is not None:
        near = abs(found - predicted - others) <= TOLERANCE_BYTES
        seen = f"{predicted + others} bytes predicted, {found} requested; {others} of them belong to no step"
        cx.records.condition(f"{case}: requested memory is the predicted one", near, seen)
    return step
