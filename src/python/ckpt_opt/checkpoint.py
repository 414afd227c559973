"""Selective activation checkpointing by a plan, for models that are not compiled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ckpt_opt.joint import signature
from ckpt_opt.planner import Plan

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_policy(plan: Plan) -> Callable[[], Contexts]:
    """Returns a `context_fn` for `torch.utils.checkpoint.checkpoint` that keeps what a plan keeps.

        plan = ckpt_opt.plan_module(model, *inputs, budget="60%")
        keep = ckpt_opt.checkpoint_policy(plan)
        x = checkpoint(layer, x, use_reentrant=False, context_fn=keep)      # for each layer

    Of the calls of an op on operands of the same shapes, it keeps the results of as many as the plan does, evenly over the
    step. PyTorch recomputes a whole layer at once, with every op of it whose result is not kept, needed or not, and keeps all
    that surrounds the layers. So neither peak nor overhead are those of the plan: measure them, or use `backend`, which keeps
    its promise. Gradients are those without checkpointing.

    Args:
        plan: A plan of the same model, at the sizes that it is trained with.
    """
    calls: Counter[str] = Counter()

    def contexts() -> Contexts:
        decided: defaultdict[str, list[CheckpointPolicy]] = defaultdict(list)
        repeated: Counter[str] = Counter()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = signature(op, (args, kwargs))
            if context.is_recompute:
                # A region calls the same ops in the same order again.
                repeated[name] += 1
                return decided[name][repeated[name] - 1]
            kept, total = plan.kept_calls.get(name, (0, 1))
            call = calls[name] % total
            calls[name] += 1
            keeps = (call + 1) * kept // total > call * kept // total
            decided[name].append(CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE)
            return decided[name][-1]

        made: Contexts = create_selective_checkpoint_contexts(policy)
        return made

    return contexts
