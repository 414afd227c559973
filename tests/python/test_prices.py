"""What ops cost: by formulas where PyTorch has none or a wrong one, by a model of the device, and by measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ckpt_opt import prices
from ckpt_opt.prices import Prices, flops_of


def counted(work: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_backward_of_a_grouped_convolution_is_twice_its_forward(groups: int) -> None:
    x, weight = torch.ones(2, 8, 6, 6), torch.ones(16, 8 // groups, 3, 3)
    forward = counted(lambda: F.conv2d(x, weight, padding=1, groups=groups))
    options = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    for mask in ([True, True, False], [False, True, False]):
        values = ((torch.ones(2, 16, 6, 6), x, weight, *options, mask), {})
        assert flops_of(torch.ops.aten.convolution_backward.default, values, None) == sum(mask) * forward


def test_grouped_products_count_as_their_groups_one_by_one() -> None:
    offsets = torch.tensor([3, 5, 9], dtype=torch.int32)
    rows, tables = torch.ones(9, 4), torch.ones(3, 4, 6)
    cases = {
        "rows": ((rows, tables), [(rows[a:b], tables[i]) for i, (a, b) in enumerate([(0, 3), (3, 5), (5, 9)])]),
        "columns": (
            (tables.transpose(1, 2), rows.T),
            [(tables[i].T, rows[a:b].T) for i, (a, b) in enumerate([(0, 3), (3, 5), (5, 9)])],
        ),
        "sums": (
            (rows.T, torch.ones(9, 6)),
            [(rows[a:b].T, torch.ones(9, 6)[a:b]) for a, b in [(0, 3), (3, 5), (5, 9)]],
        ),
        "whole": ((torch.ones(3, 5, 4), tables), [(torch.ones(5, 4), tables[i]) for i in range(3)]),
    }
    for name, (operands, groups) in cases.items():
        one_by_one = sum(counted(lambda a=a, b=b: a @ b) for a, b in groups)
        found = flops_of(torch.ops.aten._grouped_mm.default, ((*operands, offsets), {}), None)
        assert found == one_by_one > 0, name


@pytest.mark.parametrize("queries,width", [(17, 8), (5, 16)])
def test_attention_on_a_cpu_counts_as_its_products(queries: int, width: int) -> None:
    q, k, v = torch.ones(2, 4, queries, 8), torch.ones(2, 4, 9, 8), torch.ones(2, 4, 9, width)
    scores = counted(lambda: q @ k.mT)
    result = counted(lambda: torch.ones(2, 4, queries, 9) @ v)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert flops_of(op.default, ((q, k, v), {}), None) == scores + result > 0
    grad = torch.ones(2, 4, queries, width)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = flops_of(backward.default, ((grad, q, k, v, grad, None, 0.0, False), {}), None)
    assert found == 3 * scores + 2 * result


def test_what_calls_a_library_is_not_priced_as_if_it_were_fused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(64, 64)
    wave = graph.call_function(torch.ops.aten.sin.default, (x,))
    ordered = graph.call_function(torch.ops.aten.sort.default, (x,))
    wave.meta["val"], ordered.meta["val"] = torch.ones(64, 64), (torch.ones(64, 64), torch.ones(64, 64).long())
    eager, fused = Prices(measure=False, fused=False), Prices(measure=False, fused=True)
    assert fused(ordered) == eager(ordered)
    assert fused(wave)[0] < 0.5 * eager(wave)[0]


def test_collectives_do_not_run_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each process measures for itself. Collectives that it ran more often than others would be paired with those of the model.
    runs = []

    def look(work: Callable[[], Any]) -> int:
        runs.append(work)
        return 1

    monkeypatch.setattr(prices, "median_us", look)
    monkeypatch.setattr(prices, "scratch_bytes", look)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    received = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sent,))
    wave = graph.call_function(torch.ops.aten.sin.default, (received,))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(64, 64)
    price = Prices(measure=True, fused=False)
    assert price(sent)[0] > 1 and price(received)[0] > 1 and not runs
    assert price(wave)[0] == 1 and len(runs) == 2
