"""Plans without a compiler, files for the command line, and `stop_gradient`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckpt_opt
from ckpt_opt.prices import allocated_bytes


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.table(ids))))


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([os.environ["CKPT_OPT_BIN"], *map(str, words)], capture_output=True, text=True, check=True)


def test_a_plan_without_compiling_is_that_of_the_backend() -> None:
    torch.manual_seed(0)
    model, ids = Head(), torch.randint(0, 16, (64, 32))
    loss = lambda y: y.pow(2).mean()  # noqa: E731
    plan = ckpt_opt.plan_module(model, ids, budget="80%", loss=loss)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    torch._dynamo.reset()
    step = torch.compile(lambda ids: model(ids).pow(2).mean(), backend=ckpt_opt.backend("80%", inner="aot_eager"))
    step(ids)
    assert plan.peak_bytes == ckpt_opt.last_plans[-1].peak_bytes
    assert plan.static_bytes == ckpt_opt.last_plans[-1].static_bytes
    named = ckpt_opt.plan_module(model, budget="80%", kwargs={"ids": ids}, loss=loss)
    assert named.gradient_bytes == plan.gradient_bytes


def test_a_model_without_gradients_has_no_plan() -> None:
    model = Head().requires_grad_(False)
    with pytest.raises(ValueError, match="no backward pass"):
        ckpt_opt.plan_module(model, torch.zeros(2, 3, dtype=torch.long), budget="100%")


def test_an_exported_model_has_its_names_sizes_and_loss(tmp_path: Path) -> None:
    ids = torch.randint(0, 16, (4, 6))
    file = ckpt_opt.export(
        Head(), (ids,), tmp_path / "head.pt2", loss=lambda y: y.pow(2).mean(), dynamic={"ids": {0: "batch", 1: "seq"}}
    )
    seen = json.loads(command("inspect", file, "--format", "json").stdout)
    text = json.dumps(seen)
    assert all(name in text for name in ("table.weight", "up.bias", "down.weight"))
    plan = json.loads(
        command("plan", file, "--dim", "batch=32", "--dim", "seq=8", "--budget", "90%", "--format", "json").stdout
    )
    assert plan["peak_after_bytes"] < plan["peak_before_bytes"]


def test_an_export_with_wrong_names_is_refused(tmp_path: Path) -> None:
    ids = torch.randint(0, 16, (4, 6))
    with pytest.raises(ValueError, match="found tokens"):
        ckpt_opt.export(Head(), (ids,), tmp_path / "a.pt2", dynamic={"tokens": {0: "batch"}})
    with pytest.raises(ValueError, match="pt2"):
        ckpt_opt.export(Head(), (ids,), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(ckpt_opt.stop_gradient(self.first(x))).pow(2).mean()


def test_an_onnx_export_keeps_where_a_gradient_stops(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, x = Stopped(), torch.randn(2, 4)
    model(x).backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None
    file = tmp_path / "stopped.onnx"
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    said = command("plan", file, "--policy", "none").stderr
    assert "first.weight" in said and "second.weight" not in said


class Layer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def test_a_checkpoint_keeps_what_the_plan_keeps() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(6)))
    x = torch.randn(512, 64)

    def stepped(context: Any) -> tuple[list[torch.Tensor], int]:
        """Returns gradients and the peak."""

        def step() -> None:
            y = x
            for layer in layers:
                y = layer(y) if context is None else checkpoint(layer, y, use_reentrant=False, context_fn=context)
            y.square().mean().backward()

        layers.zero_grad()
        torch.manual_seed(1)
        step()
        found = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        layers.zero_grad()
        return found, allocated_bytes(step)[0]

    plain, most = stepped(None)
    peaks = []
    for budget in ("100%", "70%", "40%"):
        keep = ckpt_opt.checkpoint_policy(
            ckpt_opt.plan_module(layers, x, budget=budget, loss=lambda y: y.square().mean())
        )
        found, peak = stepped(keep)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        peaks.append(peak)
    assert peaks[2] < peaks[1] < peaks[0] <= most


def test_a_checkpoint_of_another_model_recomputes_all() -> None:
    other = ckpt_opt.plan_module(Layer(32), torch.randn(8, 32), budget="100%")
    layer, x = Layer().eval(), torch.randn(512, 64)
    layer(x).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False, context_fn=ckpt_opt.checkpoint_policy(other)).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(layer.parameters(), expected, strict=True) if p.grad is not None)
