"""Line charts as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, EDGE = 860, 460, 64


@dataclass(frozen=True)
class Curve:
    """Points that a line joins."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    stroke: float = 2
    is_dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """A named axis with the numbers that are written beside it; the first and the last may widen what it spans."""

    name: str
    ticks: Sequence[tuple[float, str]]
    is_logarithmic: bool = False

    def place(self, number: float, numbers: list[float]) -> float:
        """Returns where a number lies, from 0 to 1, on an axis that shows all `numbers`."""
        all_shown = [*numbers, *(tick for tick, _ in self.ticks)]
        scaled = math.log if self.is_logarithmic else float
        low, high = scaled(min(all_shown)), scaled(max(all_shown))
        return (scaled(number) - low) / ((high - low) or 1)


def chart(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """Draws curves with a legend."""
    numbers = [[point[i] for curve in curves for point in curve.points] for i in (0, 1)]

    def at(number: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * x.place(number, numbers[0])

    def height(number: float) -> float:
        return EDGE + (HEIGHT - 2 * EDGE) * (1 - y.place(number, numbers[1]))

    bottom, right = HEIGHT - EDGE, WIDTH - EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for tick, text in y.ticks:
        lines.append(f'<path d="M{EDGE} {height(tick):.1f}H{right}" stroke="#ddd"/>')
        lines.append(f'<text x="{EDGE - 6}" y="{height(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in x.ticks:
        lines.append(f'<text x="{at(tick):.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
    lines.append(f'<path d="M{EDGE} {EDGE}V{bottom}H{right}" fill="none" stroke="#222"/>')
    for row, curve in enumerate(curves):
        pen = f'stroke="{curve.color}" stroke-width="{curve.stroke}"' + (
            ' stroke-dasharray="6 4"' if curve.is_dashed else ""
        )
        points = " ".join(f"{at(a):.1f},{height(b):.1f}" for a, b in curve.points)
        lines.append(f'<polyline points="{points}" fill="none" {pen}/>')
        top = EDGE / 2 + 18 * row
        lines.append(f'<path d="M{right - 250} {top}h26" {pen}/>')
        lines.append(f'<text x="{right - 216}" y="{top + 4}">{curve.label}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 18}" text-anchor="middle">{x.name}</text>')
    lines.append(f'<text x="{EDGE}" y="{EDGE - 20}">{y.name}</text>')
    return "\n".join([*lines, "</svg>", ""])
