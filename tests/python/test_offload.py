"""Results that leave the device's memory between forward and backward pass."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_opt
from ckpt_opt.offload import in_file
from ckpt_opt.planner import FETCH, OFFLOAD, RELEASE, RUN, Step, peak_of, steps_of
from ckpt_opt.prices import allocated_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Mean(nn.Module):
    """So that the result is small: plans count it, and its gradient, to the end of the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def gradients(model: nn.Module, step: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    step(x).pow(2).mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measured_peak(model: nn.Module, step: nn.Module, x: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)
    gc.collect()
    return allocated_bytes(lambda: step(x).sum().backward())[0]


@pytest.mark.parametrize("rows", [2048, 1024])
@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_offloaded_results_change_no_bit_and_take_what_was_planned(word: str, rows: int) -> None:
    model, x = nn.Sequential(*(Block() for _ in range(8)), Mean()), torch.randn(rows, 32)
    other = copy.deepcopy(model)
    expected = gradients(other, other, x)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        torch.compile(model, backend=ckpt_opt.backend("1%", inner="aot_eager"))(x)
    error = raised.value.inner_exception
    assert isinstance(error, ckpt_opt.BudgetError) and error.smallest_bytes is not None
    # Less than recomputation alone reaches.
    budget = error.smallest_bytes - 100_000
    torch._dynamo.reset()
    step = torch.compile(model, backend=ckpt_opt.backend(budget, inner="aot_eager", offload=word), dynamic=rows == 1024)
    found = gradients(model, step, x)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    plan = ckpt_opt.last_plans[-1]
    assert plan.offloaded and "are offloaded" in str(plan) and plan.peak_bytes <= budget
    assert abs(measured_peak(model, step, x) - (plan.peak_bytes - plan.static_bytes)) <= 64


def test_offloaded_results_take_what_was_computed_when_compiled_by_inductor() -> None:
    model, x = nn.Sequential(*(Block() for _ in range(2))).eval(), torch.randn(2048, 32)
    expected = gradients(model, model, x)
    step = torch.compile(
        lambda x: model(x).pow(2).mean(), backend=ckpt_opt.backend("70%", offload="cpu"), fullgraph=True
    )
    model.zero_grad()
    torch.manual_seed(3)
    step(x).backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)
    (plan,) = ckpt_opt.last_plans
    assert plan.offloaded and plan.compiled_peak_bytes is not None and plan.limit_bytes is not None
    assert plan.compiled_peak_bytes <= plan.limit_bytes
    model.zero_grad(set_to_none=True)
    gc.collect()
    measured, _ = allocated_bytes(lambda: step(x).backward())
    assert abs(measured - (plan.compiled_peak_bytes - plan.static_bytes)) <= 64


def test_offloading_without_a_price_is_refused() -> None:
    for options in ({"policy": "none"}, {"budget": "60%", "objective": "flops"}):
        with pytest.raises(ValueError, match="weighs the time of transfers"):
            ckpt_opt.backend(offload="auto", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload: expected one of none, auto, cpu, found 'disk'"):
        ckpt_opt.backend("60%", offload="disk")


def test_a_policy_may_offload_all_else() -> None:
    model, x = nn.Sequential(*(Block() for _ in range(2))), torch.randn(512, 32)
    other = copy.deepcopy(model)
    expected = gradients(other, other, x)
    step = torch.compile(model, backend=ckpt_opt.backend(policy="none", inner="aot_eager", offload="cpu"))
    assert all(torch.equal(f, e) for f, e in zip(gradients(model, step, x), expected, strict=True))
    (plan,) = ckpt_opt.last_plans
    assert plan.offloaded and not plan.recomputed and plan.peak_bytes < plan.unplanned_peak_bytes


def test_a_schedule_with_moves_is_read_as_the_command_writes_it() -> None:
    numbers = [0, 1, 2, 4, 3, 5, 6, 7, 8, 6, 2, 4]
    assert steps_of(numbers, [1, 3]) == [
        Step(RUN, 0),
        Step(RUN, 1),
        Step(OFFLOAD, 1),
        Step(RUN, 2),
        Step(RELEASE, 1),
        Step(RUN, 3),
        Step(OFFLOAD, 3),
        Step(RELEASE, 3),
        Step(RUN, 4),
        Step(FETCH, 3),
        Step(FETCH, 1),
        Step(RUN, 2),
    ]
    # The results of the first op leave while the second runs; nothing reads the smaller one later.
    ops = [
        {"ins": [], "outs": [0, 1]},
        {"ins": [0], "outs": [2]},
        {"ins": [0, 2], "outs": [3]},
    ]
    values = [{"bytes": size, "kind": "act"} for size in (100, 10, 20, 1)]
    graph = {"ops": ops, "values": values, "outputs": [3]}
    assert peak_of(graph, [0, 1, 2]) == 121
    assert peak_of(graph, [0, 1, 2, 3, 1, 4], [0]) == 121


def test_a_file_keeps_the_layout_and_the_bits() -> None:
    for tensor in (torch.randn(6, 4).t(), torch.randn(3, 5).to(torch.bfloat16), torch.arange(9) % 2 == 0):
        copied = in_file(tensor).copy_(tensor)
        assert copied.stride() == tensor.stride() and torch.equal(copied, tensor)
