"""Writes the page of a sweep's results: rates by format, failures by cause, and one line for each model.

    python tools sweep-table --results FILE --out docs/sweep.md [--compact FILE]

Rates are over what PyTorch exports and differentiates. Failures are grouped by the first column that fails, and by its cause
without names and numbers; those that nothing reports come first. `--compact` writes the results without details.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools.lib import options
from tools.lib.zoo import architectures
from tools.oracle.sweep import FAMILIES, SILENT, read
from tools.oracle.sweep_job import COLUMNS, FORMATS, RUNTIME, Row

EXAMPLES = 6
GOOD = ("yes", "equal", "warned")
KEPT = ("model", "group", "variant", "format", "sizes", *COLUMNS, RUNTIME, "cause", "fixed", "seconds")
"""What `--compact` keeps."""


def verdict(row: Row) -> str:
    """Returns `yes` if every column is good, else the first that is not; for gradients, what is wrong with them."""
    if "built" in row.get("cause", {}):
        return "not built"
    for column in COLUMNS:
        value = row.get(column, "no")
        if value not in GOOD:
            return (
                "not exported" if column == "exported" else value if column == "gradients" and value != "no" else column
            )
    return RUNTIME if row.get(RUNTIME) == "no" else "yes"


def counted(rows: list[Row], column: str) -> int:
    return sum(row.get(column) in GOOD for row in rows)


def totals(rows: list[Row]) -> list[str]:
    """Returns the table of rates, one line for each format and kind of sizes."""
    lines = [
        "| format | sizes | tried | exported | imported | gradients | under their names | planned | peak | all | in ONNX Runtime |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for form in FORMATS:
        for sizes in ("static", "dynamic"):
            own = [row for row in rows if (row["format"], row["sizes"]) == (form, sizes)]
            exported = [row for row in own if row.get("exported") == "yes"]
            if not exported:
                continue
            right = sum(row.get("gradients") in ("equal", "warned", "unnamed", "split", "stranger") for row in exported)
            named = sum(row.get("gradients") in ("equal", "warned", "stranger") for row in exported)
            every = sum(verdict(row) == "yes" for row in exported)
            counts = [
                counted(exported, "imported"),
                right,
                named,
                counted(exported, "planned"),
                counted(exported, "peak"),
                every,
            ]
            cells = [f"{count} ({100 * count / len(exported):.1f} %)" for count in counts]
            run = [row for row in exported if RUNTIME in row]
            cells.append(f"{counted(run, RUNTIME)} of {len(run)}" if run else "")
            lines.append(f"| {form} | {sizes} | {len(own)} | {len(exported)} | {' | '.join(cells)} |")
    return lines


def groups(rows: list[Row]) -> list[str]:
    """Returns the failures by column and cause, the silent ones first, then the most frequent."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        word = verdict(row)
        if word != "yes":
            column = next((c for c in ("built", *COLUMNS, RUNTIME) if c in row.get("cause", {})), "")
            found[word, row.get("cause", {}).get(column, "")].append(row)
    order = [
        *SILENT,
        "unnamed",
        "gradients",
        "peak",
        "planned",
        "imported",
        RUNTIME,
        "not exported",
        "not built",
    ]
    lines = ["| what | cause | files | models, for example |", "|---|---|--:|---|"]
    for (word, cause), own in sorted(found.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]), item[0])):
        models = list(dict.fromkeys(row["model"] for row in own))
        forms = Counter(f"{row['format']} {row['sizes']}" for row in own)
        shown = ", ".join(models[:EXAMPLES]) + (f" and {len(models) - EXAMPLES} more" if len(models) > EXAMPLES else "")
        where = ", ".join(f"{form} {count}" for form, count in forms.items() if form != "- -")
        lines.append(f"| {word} | {cell(cause)} | {len(own)}{f' ({where})' if where else ''} | {shown} |")
    return lines


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def models(rows: list[Row]) -> list[str]:
    """Returns one line for each model."""
    kinds = [(form, sizes) for form in FORMATS for sizes in ("static", "dynamic")]
    kinds = [kind for kind in kinds if any((row["format"], row["sizes"]) == kind for row in rows)]
    lines = ["| model | " + " | ".join(f"{f} {s}" for f, s in kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
    by_model: dict[str, dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in rows:
        by_model[row["model"]][row["format"], row["sizes"]] = row
    for model, own in by_model.items():
        if ("-", "-") not in own:
            lines.append(f"| {model} | " + " | ".join(verdict(own[k]) if k in own else "" for k in kinds) + " |")
    return lines


def pins() -> str:
    """Returns the versions that the requirements pin."""
    lines = (options.ROOT / "tools/requirements-torch.txt").read_text().splitlines()
    return ", ".join(line.replace("==", " ") for line in lines if line and not line.startswith("#"))


def page(rows: list[Row]) -> Iterable[str]:
    unbuilt = {row["model"] for row in rows if row["format"] == "-"}
    tried = {row["model"] for row in rows}
    yield "# Architectures of transformers and timm"
    yield ""
    yield "Made by `python tools sweep-table --out docs/sweep.md` from the results of `python tools sweep`, whose `--help`"
    yield f"describes the columns. {pins()}."
    yield ""
    known = len(architectures(list(FAMILIES)))
    yield f"{len(tried)} of {known} architectures were tried. Of {len(unbuilt)} of them no small model was built, or PyTorch does not"
    yield "differentiate it."
    yield "Rates are over what PyTorch exports and differentiates. *Gradients* are PyTorch's wherever they are found;"
    yield "*under their names*: the file or `inspect` also tells the name of each parameter, or a warning names it."
    yield ""
    yield from totals(rows)
    silent = sum(row.get("gradients") in SILENT for row in rows)
    yield ""
    yield "## Failures by cause"
    yield ""
    yield f"{silent} files have a silent difference: a gradient is *different* or *missing* without a warning, *split* over copies of"
    yield "a parameter, or a constant that is no parameter gets one (*stranger*). `N` stands for a number and `…` for a name."
    yield ""
    yield from groups([row for row in rows if verdict(row) not in ("not built", "not exported")])
    yield ""
    yield "What PyTorch itself does not build, differentiate or export:"
    yield ""
    yield from groups([row for row in rows if verdict(row) in ("not built", "not exported")])
    yield ""
    yield "## Models"
    yield ""
    yield "An entry names the first column that fails."
    yield ""
    yield from models(rows)
    yield ""


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="results of `python tools sweep`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write")
    parser.add_argument("--compact", type=Path, metavar="FILE", help="write the results without details")
    args = parser.parse_args()
    rows = read(args.results)
    args.out.write_text("\n".join(page(rows)))
    if args.compact:
        kept = [{key: row[key] for key in KEPT if key in row} for row in rows]
        args.compact.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept))
    print("\n".join(totals(rows)))
    return 0
