"""What every test starts with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ckpt_opt


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ckpt_opt.last_plans.clear()
    yield
    torch._dynamo.reset()
