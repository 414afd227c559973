"""How masks are saved between the passes of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch import partitioners as aot
from torch._functorch.aot_autograd import aot_function

import ckpt_opt
from ckpt_opt import inductor
from ckpt_opt.masks import save_as_bytes

Function = Callable[[torch.Tensor], Any]


def leaky(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.1 * x) * 2


def two_masks(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.1 * x) * torch.where(x > 0.5, 3 * x, 2 * x)


def with_mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = x > 0
    return torch.where(mask, x, 0.1 * x) * 2, mask


def with_count(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = x > 0
    return torch.where(mask, x, 0.1 * x) * 2, mask.sum()


def saved_types(forward: torch.fx.GraphModule, outputs: int) -> list[torch.dtype]:
    results: Any = forward.graph.output_node().args[0]
    return [node.meta["val"].dtype for node in results[outputs:]]


def trained(function: Function) -> tuple[torch.Tensor, list[torch.dtype]]:
    """Returns the gradient of a function's first result, and the types of what its forward pass saves."""
    saved: list[torch.dtype] = []

    def partition(module: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        passes = aot.default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        masks = [node for node in passes[0].graph.nodes if node.target is torch.ops.aten.gt.Scalar]
        for mask in masks:
            # An op that runs twice has another name in the forward pass.
            mask._rename("again")
        save_as_bytes(*passes, num_fwd_outputs)
        saved.extend(saved_types(passes[0], num_fwd_outputs))
        return passes

    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    results = aot_function(function, lambda module, _: module, partition_fn=partition)(x)
    return gradient_of(results if isinstance(results, torch.Tensor) else results[0], x), saved


def gradient_of(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(result, x, torch.arange(12.0).reshape(3, 4))
    return gradient


@pytest.mark.parametrize("function", [leaky, two_masks])
def test_masks_are_saved_as_bytes(function: Function) -> None:
    gradient, saved = trained(function)
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    assert torch.uint8 in saved and torch.bool not in saved
    assert torch.equal(gradient, gradient_of(function(x), x))


@pytest.mark.parametrize("function", [with_mask, with_count])
def test_a_mask_that_others_read_stays(function: Function) -> None:
    gradient, saved = trained(function)
    assert torch.bool in saved and torch.uint8 not in saved
    assert torch.equal(gradient, trained(leaky)[0])


def trained_by_inductor(monkeypatch: pytest.MonkeyPatch, save: Callable[..., None]) -> tuple[Any, ...]:
    """Returns the gradients of a model with masks, the peak, and the types of what the forward pass saves."""
    types: list[torch.dtype] = []

    def spied(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> None:
        save(forward, backward, outputs)
        types.extend(saved_types(forward, outputs))

    monkeypatch.setattr(inductor, "save_as_bytes", spied)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = (torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = torch.nn.Sequential(*layers)
    step = torch.compile(model, backend=ckpt_opt.backend("100%"))
    step(torch.randn(128, 32)).square().sum().backward()
    return [p.grad for p in model.parameters()], ckpt_opt.last_plans[-1].compiled_peak_bytes, types


def test_gradients_and_peak_are_those_of_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, peak, types = trained_by_inductor(monkeypatch, save_as_bytes)
    expected, peak_of_booleans, booleans = trained_by_inductor(monkeypatch, lambda *_: None)
    assert torch.uint8 in types and torch.bool in booleans
    assert all(map(torch.equal, gradients, expected))
    assert peak == peak_of_booleans
