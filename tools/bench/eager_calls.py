"""Counts the calls of ATen operators in a training step of the GPT-2 fixture in eager PyTorch.

    python tools eager_calls [--batch N] [--seq N]

The step is forward, causal language-model loss and backward, without an optimizer. Calls are counted below autograd, where they
reach a kernel. Views are counted apart: they compute nothing. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


class Calls(TorchDispatchMode):
    """Counts operators, and which of them only make views."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = func.is_view or func._schema.name == "aten::detach"
        (self.views if is_view else self.kernels)[str(func)] += 1
        return func(*args, **(kwargs or {}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=24)
    options = parser.parse_args()
    sys.path.insert(0, str(FIXTURES))
    make = importlib.import_module("make")
    model = make.gpt2_model()
    ids = torch.randint(3, make.VOCAB, (options.batch, options.seq))
    with Calls() as calls:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for counted in (calls.kernels, calls.views):
        for name, count in counted.most_common():
            print(f"{count:6} {name}")
        print(f"{counted.total():6} {'kernels' if counted is calls.kernels else 'views'}")
    return 0
