"""Steps that train the packed models through the Python package, and judge bits and memory by eager PyTorch."""

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
    """Returns a step that runs plans op by op: gradients have the bits of eager PyTorch, and memory is as predicted."""

    def step(cx: Context) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        peer = Peer(cx, model)
        import torch

        from tools.lib.models import eager_step

        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        ckpt_opt = package(cx)
        module = peer.module()
        expected = eager_step(module, peer.tokens)()
        for name, arguments in WAYS.items():
            case = f"{model}, package, {name}"
            plan, gradients = trained(
                cx, peer, module, case, ckpt_opt.backend(inner="aot_eager", on_infeasible="smallest", **arguments)
            )
            pairs = list(zip(gradients, expected, strict=True))
            differ = sum(not torch.equal(ours, theirs) for ours, theirs in pairs)
            what = f"{case}: gradients have the bits of eager PyTorch"
            cx.records.condition(what, not differ, f"{differ} of {len(pairs)} differ")
            cx.records.add(plan=case, overhead_pct=plan.overhead_pct, peak_bytes=plan.peak_bytes)

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
        plan, _ = trained(cx, peer, module, case, ckpt_opt.backend(budget=limit or "75%", on_infeasible="smallest"))
        cx.records.add(plan=case, overhead_pct=plan.overhead_pct, peak_bytes=plan.peak_bytes)

    return step


def trained(cx: Context, peer: Peer, module: Any, case: str, backend: Any) -> tuple[Any, tuple[Any, ...]]:
    """Measures a step that a backend compiles, and whether it takes the predicted memory; returns plan and gradients."""
    import torch

    from tools.lib.models import eager_step

    ckpt_opt = package(cx)
    torch._dynamo.reset()
    ckpt_opt.last_plans.clear()
    step = eager_step(torch.compile(module, dynamic=False, fullgraph=True, backend=backend), peer.tokens)
    gradients = step()
    (plan,) = ckpt_opt.last_plans
    predicted = plan.compiled_peak_bytes or plan.peak_bytes
    del gradients
    others = 0
    if peer.tokens.is_cuda:
        torch.cuda.empty_cache()
        others = torch.cuda.memory_stats()["requested_bytes.all.current"] - plan.static_bytes
    found = peer.measured(case, step, predicted_bytes=predicted + others)
    if found is not None:
        near = abs(found - predicted - others) <= TOLERANCE_BYTES
        seen = f"{predicted + others} bytes predicted, {found} requested; {others} of them belong to no step"
        cx.records.condition(f"{case}: requested memory is the predicted one", near, seen)
    return plan, step()
