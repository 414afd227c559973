"""The code of the guide for PyTorch users runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/guides/pytorch.md"


def test_the_loop_of_the_guide_trains_within_its_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert "ops are recomputed" in capsys.readouterr().out
    plans = names["ckpt_opt"].last_plans  # type: ignore[attr-defined]
    page = tmp_path / "plan.html"
    plans[-1].html(page)
    assert "<html" in page.read_text()
