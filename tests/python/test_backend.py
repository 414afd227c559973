"""Training through `ckpt_opt.backend` gives the gradients of PyTorch, in the memory that was predicted."""

from __future__ import annotations

import copy
import gc
import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_opt
from ckpt_opt.fusion import Search, Targets
from ckpt_opt.inductor import ATTEMPTS
from ckpt_opt.prices import allocated_bytes


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Residual layers of a width, with what partitioners are known to break."""

    def __init__(
        self,
        layers: int = 6,
        width: int = 32,
        dropout: float = 0.0,
        batch_norm: bool = False,
        breaks: bool = False,
        breaks_in_loop: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width) if batch_norm else None
        self.breaks, self.breaks_in_loop = breaks, breaks_in_loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = layer(x)
            if self.breaks_in_loop:
                torch._dynamo.graph_break()
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[half:]:
            x = layer(x)
        return torch.tanh(self.norm(x)) if self.norm is not None else x


Step = Callable[[torch.Tensor], torch.Tensor]


def train(step: Step, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the result, all gradients and all buffers of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    y = step(x)
    y.float().pow(2).mean().backward()
    found = {"result": y.detach().clone()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def rows(count: int, width: int = 32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for name, tensor in expected.items() if name.endswith(".grad"))
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-5 * float(tensor.abs().max()) + 1e-6 * largest, name


def measured_peak(step: Step, model: nn.Module, x: torch.Tensor) -> int:
    """Returns the most bytes that a step holds above what was there before, by the allocations that PyTorch's profiler sees."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    return allocated_bytes(lambda: step(x).backward())[0]


def recomputed(plans: list[ckpt_opt.Plan]) -> int:
    return sum(sum(plan.recomputed.values()) for plan in plans)


@pytest.mark.parametrize("budget", ["100%", "60%", "45%"])
def test_gradients_are_those_of_eager_bit_for_bit(budget: str) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(model, model, rows(512))
    step = torch.compile(model, backend=ckpt_opt.backend(budget, inner="aot_eager"))
    assert_same_bits(train(step, model, rows(512)), expected)
    (plan,) = ckpt_opt.last_plans
    assert (plan.overhead_pct > 0) == (budget != "100%")
    assert plan.lower_bound_pct <= plan.overhead_pct + 1e-9
    share = float(budget[:-1]) / 100
    assert plan.peak_bytes - plan.static_bytes <= share * (plan.unplanned_peak_bytes - plan.static_bytes) + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("budget", ["100%", "70%", "50%", "35%", "10%"])
@pytest.mark.filterwarnings("ignore::ckpt_opt.PlanWarning")
def test_the_peak_is_the_predicted_one(budget: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    backend = ckpt_opt.backend(budget, inner="aot_eager", on_infeasible="smallest")
    step = torch.compile(lambda x: model(x).pow(2).mean(), backend=backend, dynamic=dynamic)
    step(rows(2048)).backward()
    (plan,) = ckpt_opt.last_plans
    assert abs(measured_peak(step, model, rows(2048)) - (plan.peak_bytes - plan.static_bytes)) <= 64


def test_a_dropout_is_recomputed_from_the_state_of_the_generator() -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.3)
    other = copy.deepcopy(model)
    step = torch.compile(model, backend=ckpt_opt.backend("20%", inner="aot_eager", on_infeasible="smallest"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckpt_opt.PlanWarning)
        found = train(step, model, rows(4096))
    assert_same_bits(found, train(other, other, rows(4096)))
    draws = [op for op in ckpt_opt.last_plans[0].graph["ops"] if op["kind"].startswith("aten.native_dropout")]
    assert any(op["name"] in ckpt_opt.last_plans[0].recomputed for op in draws)


def test_a_refusal_lists_the_largest_tensors_only() -> None:
    torch.manual_seed(0)
    with pytest.raises(ckpt_opt.BudgetError) as raised:
        ckpt_opt.plan_module(Net(layers=12), rows(16), budget="1%")
    lines = [line for line in str(raised.value).splitlines() if "at the peak" in line]
    assert len(lines) == 11 and re.search(r"\d+ bytes in \d+ more", lines[-1])


def test_a_budget_that_nothing_fits_into_says_the_smallest_one() -> None:
    model = Net()
    step = torch.compile(model, backend=ckpt_opt.backend(400_000, inner="aot_eager"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="smallest possible peak is") as raised:
        train(step, model, rows(512))
    # torch.compile wraps what a backend raises.
    error = raised.value.inner_exception
    assert isinstance(error, ckpt_opt.BudgetError) and error.smallest_bytes is not None
    torch._dynamo.reset()
    step = torch.compile(model, backend=ckpt_opt.backend(error.smallest_bytes, inner="aot_eager"))
    train(step, model, rows(512))
    assert ckpt_opt.last_plans[-1].peak_bytes <= error.smallest_bytes


@pytest.mark.parametrize("budget", [60, "0.5", "6 potatoes", -1, True, None])
def test_a_budget_that_means_nothing_is_refused(budget: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        ckpt_opt.backend(budget)  # type: ignore[arg-type]


def trained_by_inductor(model: nn.Module, budget: str | int, count: int = 2048, **options: object) -> ckpt_opt.Plan:
    """Takes two steps, of which the second has the peak that was computed; returns the plan."""
    step = torch.compile(lambda x: model(x).pow(2).mean(), backend=ckpt_opt.backend(budget, **options))  # type: ignore[arg-type]
    step(rows(count)).backward()
    (plan,) = ckpt_opt.last_plans
    assert plan.compiled_peak_bytes is not None
    assert abs(measured_peak(step, model, rows(count)) - (plan.compiled_peak_bytes - plan.static_bytes)) <= 64
    return plan


@pytest.mark.parametrize("budget", ["100%", "50%", "30%"])
def test_inductor_takes_what_was_computed_and_within_the_budget(budget: str) -> None:
    torch.manual_seed(0)
    plan = trained_by_inductor(Net(), budget)
    assert plan.compiled_peak_bytes is not None and plan.limit_bytes is not None
    assert plan.compiled_peak_bytes <= plan.limit_bytes


class Attention(nn.Module):
    """Its kernel takes scratch, and a convolution has its own layout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x.view(-1, 3, 32, 32)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 2, 48).transpose(1, 2).split(16, -1)
        return F.scaled_dot_product_attention(q, k, v).sin().flatten(1)


def test_inductor_takes_what_was_computed_with_libraries_of_kernels() -> None:
    torch.manual_seed(0)
    model = Attention()
    step = torch.compile(lambda x: model(x).pow(2).mean(), backend=ckpt_opt.backend("10MB"))
    images = torch.randn(8, 3, 32, 32)
    step(images).backward()
    (plan,) = ckpt_opt.last_plans
    assert plan.compiled_peak_bytes is not None
    assert abs(measured_peak(step, model, images) - (plan.compiled_peak_bytes - plan.static_bytes)) <= 64


def test_inductor_returns_inputs_that_are_saved_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten())
    images = torch.randn(8, 3, 64, 64)
    step = torch.compile(lambda x: model(x).pow(2).mean(), backend=ckpt_opt.backend("10MB"))
    step(images).backward()
    model.zero_grad(set_to_none=True)
    # The convolution reads a copy of another layout, which ends with it.
    assert allocated_bytes(lambda: step(images))[1] < images.nbytes


def test_inductor_recomputes_what_is_free_at_any_budget() -> None:
    torch.manual_seed(0)
    model = Net()
    torch.compile(model, backend=ckpt_opt.backend(policy="none"))(rows(512)).sum().backward()
    torch._dynamo.reset()
    torch.compile(model, backend=ckpt_opt.backend(10**9))(rows(512)).sum().backward()
    everything, plan = ckpt_opt.last_plans
    # A part of gelu, which its gradient computes from the operand that it reads.
    assert len([name for name in plan.recomputed if name.startswith("erf")]) == 6
    assert plan.overhead_pct == plan.flops_overhead_pct == 0
    assert plan.saved_bytes < 0.9 * everything.saved_bytes


def test_no_plan_of_inductor_costs_more_at_a_larger_budget() -> None:
    torch.manual_seed(0)
    model = Net(layers=2)
    costs, peaks = [], []
    for budget in ("60%", "75%", "100%"):
        torch._dynamo.reset()
        step = torch.compile(lambda x: model(x).pow(2).mean(), backend=ckpt_opt.backend(budget))
        step(rows(2048)).backward()
        plan = ckpt_opt.last_plans[-1]
        assert plan.compiled_peak_bytes is not None and plan.limit_bytes is not None
        assert plan.compiled_peak_bytes <= plan.limit_bytes
        costs.append(plan.overhead_pct)
        peaks.append(plan.compiled_peak_bytes)
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1] == 0
    assert peaks == sorted(peaks)


def searched(targets: Targets, limit: int, share: float) -> tuple[int, int]:
    """Returns the place that a search ends at, where code takes a share of its target, and the number of trials."""
    search, place, fitting, trials = Search(), targets.within(limit), [], 0
    while True:
        trials += 1
        excess = int(share * targets[place]) - limit
        if excess <= 0:
            fitting.append(place)
        after = search.after(targets, place, excess)
        if after is None or place == after == 0:
            break
        place = after
    return min(fitting), trials


@pytest.mark.parametrize("share", [0.6, 0.97, 1.0, 1.3])
def test_the_largest_target_within_the_budget_is_found(share: float) -> None:
    targets = Targets(first=50_000_000, static=5_000_000)
    places = []
    for limit in range(9_000_000, 80_000_000, 1_700_000):
        place, trials = searched(targets, limit, share)
        assert int(share * targets[place]) <= limit
        assert place == 0 or int(share * targets[place - 1]) > limit
        assert trials <= ATTEMPTS
        places.append(place)
    assert places == sorted(places, reverse=True)


def test_where_code_of_the_smallest_plan_misses_the_limit_larger_targets_are_tried() -> None:
    targets = Targets(first=50_000_000, static=5_000_000)
    lowest_bytes = 10_000_000
    place, nearest = targets.within(8_000_000), targets.within(lowest_bytes)
    search, tried = Search(), []
    after = search.after(targets, place, 3_000_000, lowest_bytes)
    while after is not None:
        tried.append(after)
        after = search.after(targets, after, 2_000_000)
    assert tried == [nearest - 2, nearest - 4, nearest - 6]
    assert all(targets[larger] > lowest_bytes for larger in tried)
    search = Search()
    assert search.after(targets, place, 3_000_000, lowest_bytes) == nearest - 2
    assert search.after(targets, nearest - 2, -1) is None


def test_what_inductor_takes_above_the_budget_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_opt import inductor

    torch.manual_seed(0)
    monkeypatch.setattr(inductor, "dry_run", lambda *args: int(1.3 * dry_run(*args)))
    dry_run = importlib.import_module("ckpt_opt.dry_run").dry_run
    model = Net()
    step = torch.compile(lambda x: model(x).pow(2).mean(), backend=ckpt_opt.backend("40%"))
    step(rows(2048)).backward()
    (plan,) = ckpt_opt.last_plans
    assert plan.compiled_peak_bytes is not None and plan.limit_bytes is not None
    assert plan.compiled_peak_bytes <= plan.limit_bytes
    assert plan.peak_bytes < 0.9 * plan.limit_bytes


def test_what_inductor_cannot_compile_within_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_opt import inductor

    monkeypatch.setattr(inductor, "dry_run", lambda *args: 10**9)
    model = Net(layers=2)
    step = torch.compile(model, backend=ckpt_opt.backend("50%"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="compiled by inductor") as raised:
        train(step, model, rows(512))
    error = raised.value.inner_exception
    assert isinstance(error, ckpt_opt.BudgetError) and error.smallest_bytes is not None and error.smallest_bytes > 10**9
    assert not ckpt_opt.last_plans
    torch._dynamo.reset()
    step = torch.compile(model, backend=ckpt_opt.backend("50%", on_infeasible="smallest"))
    with pytest.warns(ckpt_opt.PlanWarning, match="compiled by inductor"):
        train(step, model, rows(512))
    assert len(ckpt_opt.last_plans) == 1


def test_an_unknown_peak_of_compiled_code_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_opt import inductor

    def fails(*_: object) -> int:
        raise TypeError("no Python code")

    monkeypatch.setattr(inductor, "dry_run", fails)
    model = Net(layers=1)
    step = torch.compile(model, backend=ckpt_opt.backend("100%"))
    with pytest.warns(ckpt_opt.PlanWarning, match="could not be computed .*no Python code"):
        train(step, model, rows(64))


def test_layers_that_call_one_graph_share_a_budget() -> None:
    torch.manual_seed(0)
    model = Net(layers=8, breaks_in_loop=True)
    expected = train(model, model, rows(512))
    free = ckpt_opt.backend(10**9, inner="aot_eager")
    assert_same_bits(train(torch.compile(model, backend=free), model, rows(512)), expected)
    largest = max(plan.peak_bytes for plan in ckpt_opt.last_plans)
    torch._dynamo.reset()
    step = torch.compile(model, backend=ckpt_opt.backend(2 * largest, inner="aot_eager"))
    with pytest.raises(ckpt_opt.BudgetError, match="wait for their backward pass"):
        train(step, model, rows(512))
    torch._dynamo.reset()
    step = torch.compile(model, backend=ckpt_opt.backend(2 * largest, inner="aot_eager", on_infeasible="smallest"))
    with pytest.warns(ckpt_opt.PlanWarning, match="wait for their backward pass"):
        assert_same_bits(train(step, model, rows(512)), expected)


def test_a_graph_that_is_compiled_again_has_the_whole_budget() -> None:
    model = Net()
    step = torch.compile(model, backend=ckpt_opt.backend(10**8, inner="aot_eager"), dynamic=False)
    for count in (512, 256):
        train(step, model, rows(count))
    step(rows(128))  # Its results are dropped.
    train(step, model, rows(64))
    assert [plan.held_bytes for plan in ckpt_opt.last_plans] == [0] * 4


class Tail(nn.Module):
    """Layers, and after a break a head with many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = Net(), nn.Linear(32, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        torch._dynamo.graph_break()
        return self.head(x.mean(0))


def test_graphs_after_a_break_need_a_reserve() -> None:
    torch.manual_seed(0)
    model, limit = Tail(), 4_000_000
    expected = train(model, model, rows(512))
    step = torch.compile(model, backend=ckpt_opt.backend(limit, inner="aot_eager"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="help: reserve=") as raised:
        train(step, model, rows(512))
    reserve = int(re.findall(r"reserve=(\d+)", str(raised.value))[0])
    torch._dynamo.reset()
    ckpt_opt.last_plans.clear()
    step = torch.compile(model, backend=ckpt_opt.backend(limit, inner="aot_eager", reserve=reserve))
    assert_same_bits(train(step, model, rows(512)), expected)
    first, second = ckpt_opt.last_plans
    assert first.peak_bytes + second.static_bytes + second.gradient_bytes <= limit
    assert first.static_bytes + first.saved_bytes + second.peak_bytes <= limit


def test_a_page_is_written_for_each_graph(tmp_path: Path) -> None:
    model = Net(breaks=True)
    backend = ckpt_opt.backend("70%", inner="aot_eager", report=tmp_path / "plan.html")
    train(torch.compile(model, backend=backend), model, rows(64))
    assert sorted(page.name for page in tmp_path.iterdir()) == ["plan-2.html", "plan.html"]
    assert all("<html" in page.read_text() for page in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"ends in \.html, found 'plan.pdf'"):
        ckpt_opt.backend("70%", report="plan.pdf")


def test_a_reserve_of_a_share_is_refused() -> None:
    with pytest.raises(ValueError, match="reserve"):
        ckpt_opt.backend("60%", reserve="1GiB")


def test_inductor_trains_within_the_plan() -> None:
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    found = train(torch.compile(model, backend=ckpt_opt.backend("50%")), model, rows(256))
    assert_close(found, train(other, other, rows(256)))
    assert recomputed(ckpt_opt.last_plans) > 0


class Residual(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_policy_takes_the_place_of_a_budget(inner: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(512, 64)
    model(x).pow(2).mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    peaks = {}
    for policy in ("none", "full", "group:2", "selective"):
        model.zero_grad()
        torch._dynamo.reset()
        torch.compile(model, backend=ckpt_opt.backend(policy=policy, inner=inner))(x).pow(2).mean().backward()
        plan = ckpt_opt.last_plans[-1]
        assert plan.lower_bound_pct is None and str(plan)
        assert bool(plan.recomputed) == (policy != "none")
        peaks[policy] = plan.peak_bytes
        for p, wanted in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, wanted) if inner == "aot_eager" else torch.allclose(p.grad, wanted, atol=1e-6)
    assert peaks["full"] < peaks["none"]


def test_a_policy_that_means_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="either a budget or a policy"):
        ckpt_opt.backend()
    with pytest.raises(ValueError, match="either a budget or a policy"):
        ckpt_opt.backend("60%", policy="full")
    for policy, reason in (("everything", "everything"), ("full", "needs layers")):
        with pytest.raises(ValueError, match=reason):
            ckpt_opt.plan_module(nn.Linear(8, 8), torch.randn(4, 8), policy=policy)
