"""The code of the guide for PyTorch users runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_opt

GUIDE = Path(__file__).parents[2] / "docs/guides/pytorch.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def callback_of(library: str) -> Any:
    """Returns the guide's callback for a library, which has to be installed."""
    names: dict[str, Any] = {}
    exec(next(block for block in blocks() if f"import {library}\n" in block), names)
    names["ckpt_opt"].last_plans.clear()
    return names["Fit"](budget="100%", inner="aot_eager")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x + self.down(torch.tanh(self.up(x)))).pow(2).mean()}


def test_the_loop_of_the_guide_trains_within_its_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(blocks()[0], names)
    assert "ops are recomputed" in capsys.readouterr().out
    plans = names["ckpt_opt"].last_plans
    page = tmp_path / "plan.html"
    plans[-1].html(page)
    assert "<html" in page.read_text()


def test_the_guide_offloads() -> None:
    names: dict[str, Any] = {}
    exec(next(block for block in blocks() if "offload=" in block), names)
    assert names["ckpt_opt"].last_plans[-1].offloaded


def test_the_guide_computes_a_loss_in_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    exec(next(block for block in blocks() if "tile_loss=" in block), {})
    assert capsys.readouterr().out == "16\n"


def test_the_callback_of_the_guide_plans_what_a_trainer_trains(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = [{"x": torch.randn(64)} for _ in range(64)]
    args = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=2, per_device_train_batch_size=32, use_cpu=True, report_to=[], save_strategy="no"
    )
    transformers.Trainer(Model(), args, train_dataset=rows, callbacks=[callback_of("transformers")]).train()
    assert [plan.is_smallest for plan in ckpt_opt.last_plans] == [False]


def test_the_callback_of_the_guide_plans_what_lightning_trains() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    rows = torch.utils.data.DataLoader([torch.randn(64) for _ in range(64)], batch_size=32)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback_of("lightning")], logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(), rows)
    assert [plan.is_smallest for plan in ckpt_opt.last_plans] == [False]
