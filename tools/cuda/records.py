"""The results of a run: one JSON object a line, each on disk before the run goes on; and the page made from them."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tools.cuda.models import UNPLANNED

RESULTS, PAGE, LOG = "results.jsonl", "evidence.md", "log.txt"
GOOD, FAILED, LATE, DROPPED, SKIPPED = "good", "failed", "out of time", "dropped", "skipped"
MEMORY = ("predicted", "requested", "allocated", "reserved", "workspace")
"""The bytes of a figure, as `<word>_bytes`."""


@dataclass(frozen=True)
class Records:
    """Appends to the results of one step."""

    folder: Path
    step: str

    def add(self, **entry: object) -> None:
        line = json.dumps({"step": self.step, **entry}) + "\n"
        file = os.open(self.folder / RESULTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)

    def condition(self, what: str, holds: bool, found: object = "") -> None:
        """Records whether something that must hold does, with what was found."""
        self.add(condition=what, holds=bool(holds), found=str(found))

    def figures(self, case: str, **values: object) -> None:
        """Records measured values of a case."""
        self.add(case=case, **values)


def read(folder: Path) -> list[dict]:
    """Returns the records of a run; a last line that was cut off is left out."""
    path = folder / RESULTS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def agrees(records: list[dict], dry: bool) -> bool:
    """Returns whether every condition holds and every step ended well; a dry run may skip steps."""
    ends = {GOOD, SKIPPED} if dry else {GOOD}
    conditions = [r["holds"] for r in records if "condition" in r]
    return bool(conditions) and all(conditions) and all(r["ended"] in ends for r in records if "ended" in r)


def summary(records: list[dict]) -> list[str]:
    """Returns what to print last: counts, then all that went wrong."""
    conditions = [r for r in records if "condition" in r]
    ends = [r for r in records if "ended" in r]
    wrong = [r for r in conditions if not r["holds"]]
    lines = [
        f"{len(conditions) - len(wrong)} of {len(conditions)} conditions hold; "
        f"{sum(r['ended'] == GOOD for r in ends)} of {len(ends)} steps ended well"
    ]
    lines += [f"does not hold: {r['step']}: {r['condition']}: {r['found']}" for r in wrong]
    lines += [f"{r['ended']}: {r['step']}: {last_line(r['said'])}" for r in ends if r["ended"] != GOOD]
    return lines


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""


def mib(count: object) -> str:
    return f"{count / 2**20:.3f}" if isinstance(count, int) else ""


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(*head: str) -> list[str]:
    return [row(*head), "|" + "---|" * len(head)]


def page(records: list[dict], dry: bool) -> str:
    """Returns the page of a run: summary, machine, conditions, figures, steps."""
    lines = ["# Evidence of a run on a CUDA device", ""]
    if dry:
        lines = ["# Dry run on the CPU", "", "Small models on a CPU: the figures say nothing about a device.", ""]
    lines += [f"- {line}" for line in summary(records)]
    lines += ["", "## Machine", "", *table("what", "value")]
    lines += [row(key, value) for r in records if "machine" in r for key, value in r["machine"].items()]
    lines += ["", "## Figures", ""]
    lines += ["A step is the median of all steps, the least one in parentheses. Memory is the peak in MiB."]
    lines += [
        "*Of unplanned* divides by our unplanned step of the same model; beside it is what the plan predicts.",
        "",
    ]
    lines += table("case", "step ms", "of unplanned", "by the plan", *MEMORY, "attention")
    medians = {r["case"]: statistics.median(r["steps_us"]) for r in records if "case" in r}
    overheads = {r["plan"]: f"{1 + r['overhead_pct'] / 100:.3f}" for r in records if "plan" in r}
    for r in records:
        if "case" in r:
            case, median = r["case"], medians[r["case"]]
            step = f"{median / 1e3:.3f} ({min(r['steps_us']) / 1e3:.3f})"
            unplanned = medians.get(f"{case.split(', ')[0]}, {UNPLANNED}")
            ratio = f"{median / unplanned:.3f}" if unplanned else ""
            kernels = " ".join(f"{name} {count}" for name, count in r.get("attention", {}).items() if count)
            memory = [mib(r.get(f"{word}_bytes")) for word in MEMORY]
            lines.append(row(case, step, ratio, overheads.get(case, ""), *memory, kernels))
    lines += ["", "## Times by op", "", *table("plan", "ms", "share of the traced step")]
    for r in records:
        if "times" in r:
            shares = (f"{op} {100 * us / r['total_us']:.0f} %" for op, us in r["most_us"])
            lines.append(row(r["times"], f"{r['total_us'] / 1e3:.3f}", ", ".join(shares)))
    lines += ["", "## Conditions", "", *table("step", "condition", "holds", "found")]
    for r in records:
        if "condition" in r:
            lines.append(row(r["step"], r["condition"], "yes" if r["holds"] else "**no**", r["found"]))
    warnings = Counter(warning for r in records for warning in r.get("warnings", []))
    lines += ["", "## Warnings of runs", "", *table("warning", "cases")]
    lines += [row(warning, count) for warning, count in sorted(warnings.items())]
    lines += ["", "## Steps", "", *table("step", "ended", "seconds", "limit", "last words")]
    for r in records:
        if "ended" in r:
            said = "" if r["ended"] == GOOD else last_line(r["said"])
            lines.append(row(r["step"], r["ended"], r["seconds"], r["limit_s"], said))
    return "\n".join([*lines, ""])
