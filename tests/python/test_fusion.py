"""What PyTorch's partitioner says that compiled code recomputes for free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch import partitioners as aot
from torch._functorch.aot_autograd import aot_function

import ckpt_opt
from ckpt_opt.fusion import free_nodes


def three_cosines(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).cos().cos().cos()


def scaled_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiplies each row by one entry of a table of sines."""
    return ((x @ w) * torch.arange(1.0, 5.0).sin()[:, None]).sin()


def names_of_free(function: Callable[..., torch.Tensor] = three_cosines, columns: int = 4) -> set[str]:
    """Returns the names of the free nodes of a function of a 4 x 4 matrix and of weights with so many columns."""
    found: list[set[str]] = []

    def partition(module: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        found.append(free_nodes(module, num_fwd_outputs))
        return aot.default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    step = aot_function(function, lambda module, _: module, partition_fn=partition)
    step(torch.ones(4, 4), torch.ones(4, columns, requires_grad=True)).sum().backward()
    return found[0]


def test_what_follows_a_product_is_free() -> None:
    free = names_of_free()
    assert {"cos", "cos_1"} <= free and "mm" not in free


def test_a_table_that_is_broadcast_is_not_free() -> None:
    assert "sin" not in names_of_free(scaled_rows, 16)
    assert "sin" in names_of_free(scaled_rows, 4)


def test_a_partitioner_that_cannot_be_asked_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(aot, "choose_saved_values_set")
    with pytest.warns(ckpt_opt.PlanWarning, match="choose_saved_values_set"):
        assert names_of_free() == set()
