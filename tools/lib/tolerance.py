"""Defines when two results count as equal. All tolerances are here.

Against PyTorch or another runtime in float32, a tensor agrees with its reference g if every element has
|Δ| <= 1e-5·max|g| + 1e-7·(largest gradient of the model). If only the sum of a gradient is known, the criterion is
|Δsum| <= 1e-4·‖g‖·√n plus the same floor. The floor exists because some gradients (such as that of a key bias before
softmax) are zero except for rounding. Outputs other than gradients use their own maximum for the floor. bfloat16 and
float16 are compared with float64: the error may not exceed 1.1 times PyTorch's own. NaN never agrees with anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

RELATIVE = 1e-5
FLOOR = 1e-7
SUM_RELATIVE = 1e-4
HALF_PRECISION_FACTOR = 1.1


@dataclass(frozen=True)
class Worst:
    """The tensor that is nearest to its tolerance, or farthest beyond it. `ratio` above 1 is a disagreement."""

    name: str = ""
    delta: float = 0.0
    allowed: float = 0.0
    ratio: float = 0.0
    problem: str = ""
    failures: int = 0

    @property
    def agrees(self) -> bool:
        return not self.problem and self.failures == 0

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        count = f"{self.failures} tensors differ; worst " if self.failures else ""
        return f"{count}{self.name}: |Δ| {self.delta:.2e}, allowed {self.allowed:.2e} (x{self.ratio:.2f})"


def largest(tensors: Mapping[str, np.ndarray]) -> float:
    """Returns max|·| over all tensors; 0 for none."""
    return max((float(np.abs(t).max()) for t in tensors.values() if t.size), default=0.0)


def disagreement(name: str, got: np.ndarray, want: np.ndarray) -> str:
    """Returns the reason why two tensors cannot be compared element by element, or an empty text."""
    if got.shape != want.shape:
        return f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    for label, tensor in (("result", got), ("reference", want)):
        if not np.isfinite(tensor).all():
            return f"{name}: the {label} is not finite"
    return ""


def pick(rows: list[Worst]) -> Worst:
    """Returns the worst row, with the number of rows beyond their tolerance."""
    for row in rows:
        if row.problem:
            return row
    if not rows:
        return Worst(problem="nothing was compared")
    top = max(rows, key=lambda row: row.ratio)
    failures = sum(row.ratio > 1.0 for row in rows)
    return Worst(top.name, top.delta, top.allowed, top.ratio, failures=failures)


def compare(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], model_largest: float | None = None) -> Worst:
    """Compares every tensor of `want`. `model_largest`: the largest gradient, or `None` for each tensor's own maximum."""
    rows = []
    for name, reference in want.items():
        if name not in got:
            return Worst(problem=f"{name}: no such result")
        problem = disagreement(name, got[name], reference)
        if problem:
            return Worst(problem=problem)
        if reference.dtype.kind not in "fV":
            same = np.array_equal(got[name], reference)
            rows.append(Worst(name) if same else Worst(problem=f"{name}: integer values differ"))
            continue
        a, b = got[name].astype(np.float64), reference.astype(np.float64)
        top = float(np.abs(b).max()) if b.size else 0.0
        allowed = RELATIVE * top + FLOOR * (top if model_largest is None else model_largest)
        rows.append(measured(name, float(np.abs(a - b).max()) if b.size else 0.0, allowed))
    return pick(rows)


def measured(name: str, delta: float, allowed: float) -> Worst:
    ratio = 0.0 if delta == 0.0 else (delta / allowed if allowed > 0.0 else float("inf"))
    return Worst(name, delta, allowed, ratio)


def compare_sums(got: Mapping[str, np.ndarray], want: Mapping[str, Mapping[str, Any]]) -> Worst:
    """Compares sums and l2 norms. `want`: name -> {shape, sum, l2}."""
    floor = FLOOR * largest(got)
    rows = []
    for name, record in want.items():
        if name not in got:
            return Worst(problem=f"{name}: no such result")
        tensor = got[name].astype(np.float64)
        if sorted(tensor.shape) != sorted(record["shape"]):
            return Worst(problem=f"{name}: shape {list(tensor.shape)}, expected {record['shape']} or its transpose")
        if not np.isfinite(tensor).all():
            return Worst(problem=f"{name}: the result is not finite")
        allowed = SUM_RELATIVE * record["l2"] * tensor.size**0.5 + floor
        rows.append(measured(f"sum({name})", abs(float(tensor.sum()) - record["sum"]), allowed))
        norm_allowed = SUM_RELATIVE * record["l2"] + floor * tensor.size**0.5
        rows.append(measured(f"‖{name}‖", abs(float(np.linalg.norm(tensor)) - record["l2"]), norm_allowed))
    return pick(rows)


def largest_element(delta: np.ndarray) -> float:
    return float(np.abs(delta).max()) if delta.size else 0.0


def root_mean_square(delta: np.ndarray) -> float:
    return float(np.sqrt(np.mean(delta**2))) if delta.size else 0.0


def compare_half(
    got: Mapping[str, np.ndarray], torch: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray],
    size: Callable[[np.ndarray], float] = largest_element,
) -> Worst:  # fmt: skip
    """bfloat16 / float16: error against float64 no larger than 1.1 times that of PyTorch's own result.

    The largest element of an error of many elements is chance, so that of two programs that round equally often one
    has a much larger one in every tenth tensor; their root mean squares are alike.
    """
    rows = []
    for name, reference in exact.items():
        if name not in got:
            return Worst(problem=f"{name}: no such result")
        problem = disagreement(name, got[name], reference)
        if problem:
            return Worst(problem=problem)
        b = reference.astype(np.float64)
        ours, theirs = (size(of[name].astype(np.float64) - b) for of in (got, torch))
        rows.append(measured(name, ours, HALF_PRECISION_FACTOR * theirs))
    return pick(rows)


def compare_pooled(
    got: Mapping[str, np.ndarray], torch: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]
) -> Worst:
    """As `compare_half`, of the root mean square over all tensors, each relative to its largest element.

    In float32 a tensor of a few elements may have the larger error by chance. A wrong tensor outweighs all rounding.
    """
    ours, theirs = [], []
    for name, reference in exact.items():
        problem = disagreement(name, got[name], reference) if name in got else f"{name}: no such result"
        if problem:
            return Worst(problem=problem)
        b = reference.astype(np.float64)
        if top := largest_element(b):
            ours.append(root_mean_square(got[name].astype(np.float64) - b) / top)
            theirs.append(root_mean_square(torch[name].astype(np.float64) - b) / top)
    whole = measured(
        "all tensors", root_mean_square(np.array(ours)), HALF_PRECISION_FACTOR * root_mean_square(np.array(theirs))
    )
    return pick([whole])
