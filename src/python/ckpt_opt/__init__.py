"""Training in PyTorch within a memory budget.

    import ckpt_opt
    model = torch.compile(model, backend=ckpt_opt.backend(budget="6GiB"))

The planner of ckpt-opt takes the place of PyTorch's partitioner inside `torch.compile`: it decides which activations the
backward pass keeps and which it computes again, so that the peak of memory of the step is at most the budget, at the least
cost. `last_plans[-1]` says what was decided, and what the best possible plan could cost at least.

The package needs PyTorch 2.9 or later, but does not depend on it, for the command `ckpt-opt` that comes with it needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_opt.planner import BudgetError, Plan, PlanWarning, last_plans

if TYPE_CHECKING:
    from ckpt_opt.backends import backend, partitioner
    from ckpt_opt.checkpoint import checkpoint_policy
    from ckpt_opt.modules import export, plan_module, stop_gradient

__all__ = [
    "BudgetError",
    "Plan",
    "PlanWarning",
    "backend",
    "checkpoint_policy",
    "export",
    "last_plans",
    "partitioner",
    "plan_module",
    "stop_gradient",
]

# Names that need PyTorch, by the module that has them.
_WITH_TORCH = {
    "backend": "backends",
    "checkpoint_policy": "checkpoint",
    "export": "modules",
    "partitioner": "backends",
    "plan_module": "modules",
    "stop_gradient": "modules",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'ckpt_opt' has no attribute {name!r}")
    from importlib import import_module

    from ckpt_opt.versions import check_torch

    check_torch(name)
    return getattr(import_module(f"ckpt_opt.{_WITH_TORCH[name]}"), name)
