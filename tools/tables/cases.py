"""Runs every check on every ONNX file of a corpus, and writes docs/cases.md.

    python tools cases --ckpt-opt BINARY --corpus DIR [--case a,b] [--file onnx18.onnx,…]
        [--policies none,full,selective,budget:50%] [--cache DIR] [--jobs N] [--rows FILE] [--page docs/cases.md]

The checks are those of corpus.py, and a comparison of the structure with what the model itself states:
  load       the file is read and typed
  layers     as many layers as PyTorch's model has modules in its outermost module lists, each named after one
  sharing    keys and values pass between exactly the layers that the model's configuration names
  written    a file for every policy: ONNX checker, explicit recompute nodes, readable
  torch      outputs, loss and full gradients of our runtime are PyTorch's; their sums are those of grads.json
  ort        ONNX Runtime, unoptimised and optimised, agrees with PyTorch, and our runtime with it, at two sizes
  bits       every plan equals the unplanned file bit for bit, dropouts included
  memory     the measured peak equals the predicted one (at most 2 % less where data decides sizes), below unplanned
  stripped   without names, metadata and doc strings: the same layers, sharing and plans. Where only metadata marks an
             initializer as frozen, `--freeze` repeats it
`--rows` keeps every check as JSON lines; files that it already holds are not checked again. Exit code 0 if no cell is red,
else 1.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from tools.lib import options
from tools.lib.compiler import Compiler, Refused
from tools.lib.reference import Case, find_cases, load_generator
from tools.oracle import corpus
from tools.oracle.corpus import Report, Row
from tools.oracle.strip import strip

POLICIES = ("none", "full", "selective", "budget:50%")
COLUMNS = ("load", "layers", "sharing", "written", "torch", "ort", "bits", "memory", "stripped")
PLAN = ("peak_before_bytes", "peak_after_bytes", "saved_bytes", "recompute_flops", "segments")
"""What makes two plans the same where names differ."""
MARKS = {"pass": "✓", "fail": "✗", "skip": "–"}


def column(check: str) -> str:
    """Returns the column of a row of corpus.py."""
    if check in COLUMNS:
        return check
    named = {"inspect": "load", "write": "written", "checker": "written", "back": "written", "verify": "bits"}
    named |= {"names": "torch", "reference": "torch", "run vs torch": "torch", "run": "torch", "source": "ort"}
    return named.get(check, "ort")


def expected_layers(model: Any) -> list[str]:
    """Returns the paths of the layers: entries of the outermost module lists whose entries have modules."""
    from torch import nn

    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(path.startswith(f"{p}.") for p in found):
            entries = [f"{path}.{name}" if path else name for name, m in module.named_children() if any(m.children())]
            found += entries if len(entries) > 1 else []
    return found


def expected_sharing(model: Any) -> list[tuple[int, int]]:
    """Returns pairs of layers, the one that computes keys and values and one that reads them, from the configuration."""
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    config = configs[0] if configs else None
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if config is None or not shared:
        return []
    kinds = config.layer_types
    first = len(kinds) - shared
    made = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return [(made[kinds[layer]], layer) for layer in range(first, len(kinds))]


def check_structure(report: Report, table: dict, case: Case, generator: ModuleType | None) -> None:
    """Adds the rows `layers` and `sharing`."""
    key = (case.label, "-", "-")
    if generator is None:
        report.add(key, "layers", None, "no PyTorch model here to count them in")
        return
    model = generator.fresh(case.name, "tiny").model
    blocks, wanted = table["blocks"], expected_layers(model)
    paths = [block["path"] for block in blocks if block.get("path")]
    good = len(blocks) == len(wanted)
    report.add(key, "layers", good, f"{len(blocks)} of {len(wanted)}, {len(paths)} with a path")
    found = sorted((s["producer"], consumer) for s in table["kv_sharing"] for consumer in s["consumers"])
    report.add(key, "sharing", found == expected_sharing(model), f"{found}")


def layers_and_sharing(table: dict) -> tuple[object, ...]:
    """Returns the parts of a table that must not depend on names."""
    return [(b["kind"], b["nodes"]) for b in table["blocks"]], table["kv_sharing"]


def check_stripped(
    report: Report, compiler: Compiler, case: Case, policies: list[str], generator: ModuleType | None, folder: Path
) -> None:
    """Row `stripped`: the file without names, against the one with them, at the sizes at which memory is measured."""
    key, bare = (case.label, "-", "-"), folder / f"{case.label.replace('/', '-')}-stripped.onnx"
    model = onnx.load(case.model)
    before = names_in_order(model)
    strip(model)
    new = dict(zip(before, names_in_order(model)))
    bare.write_bytes(model.SerializeToString(deterministic=True))
    named, nameless = compiler.inspect(case.model), compiler.inspect(bare)
    if layers_and_sharing(named) != layers_and_sharing(nameless):
        report.add(key, "stripped", False, "other layers or sharing")
        return
    trained = {p["initializer"] for p in named["parameters"] if p["trainable"]}
    bare_trained = {p["initializer"] for p in nameless["parameters"] if p["trainable"]}
    if lost := {new[name] for name in trained} - bare_trained:
        report.add(key, "stripped", False, f"parameters that are none without names: {', '.join(sorted(lost))}")
        return
    told = [name for name in before if name not in trained and new[name] in bare_trained]
    freezing = replace(compiler, options=(*compiler.options, *(word for n in told for word in ("--freeze", new[n]))))
    sizes = corpus.Source(case, generator).measured_sizes()
    symbols = list(dict.fromkeys(d for v in onnx.load(case.model).graph.input for d in named_dims(v)))
    renamed = list(dict.fromkeys(d for v in model.graph.input for d in named_dims(v)))
    bare_sizes = {new: sizes[old] for old, new in zip(symbols, renamed)}
    plans = []
    for file, dims, made_by in ((case.model, sizes, compiler), (bare, bare_sizes, freezing)):
        made = [made_by.optimize(file, folder / "plan.onnx", policy, "vjp", dims) for policy in policies]
        plans.append([[plan[field] for field in PLAN] for plan in made])
    differs = [policy for policy, a, b in zip(policies, *plans) if a != b]
    same = "same plans" + (f", told that {', '.join(told)} is not trained" if told else "")
    report.add(key, "stripped", not differs, f"other plans under {', '.join(differs)}" if differs else same)


def names_in_order(model: onnx.ModelProto) -> list[str]:
    """Returns names of initializers, then of results, in the order of the file."""
    return [t.name for t in model.graph.initializer] + [name for n in model.graph.node for name in n.output if name]


def named_dims(value: onnx.ValueInfoProto) -> list[str]:
    return [dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param]


def check_file(case: Case, args: argparse.Namespace, generator: ModuleType | None) -> list[Row]:
    report, compiler = Report(), Compiler(args.ckpt_opt)
    policies = args.policies
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            table = compiler.inspect(case.model)
        except Refused as refused:
            other = corpus.Source(case, None).refused
            good = None if other and "exit 2" in str(refused) else False
            detail = f"{refused}" + (f"; ONNX Runtime refuses the file too: {other}" if other else "")
            report.add((case.label, "-", "-"), "load", good, detail)
            return report.rows
        report.add((case.label, "-", "-"), "load", True, f"{sum(table['ops'].values())} nodes")
        check_structure(report, table, case, generator)
        args.losses = ["own" if "loss" in case.group("out") else "vjp"]
        args.fuse, args.no_runtime = "on", False
        corpus.check_case(report, compiler, case, args, generator, folder)
        try:
            check_stripped(report, compiler, case, policies, generator, folder)
        except (Refused, ValueError) as error:
            report.add((case.label, "-", "-"), "stripped", False, str(error))
    return report.rows


@dataclass
class Cell:
    mark: str
    reasons: list[str]


def cell(rows: list[Row]) -> Cell:
    """Returns red if a check fails, grey if none could run, else green; with the reasons of all that did not pass."""
    failed = [r for r in rows if r.status == "fail"]
    skipped = [r for r in rows if r.status == "skip"]
    passed = [r for r in rows if r.status == "pass"]
    reasons = []
    for row in failed + skipped:
        policy = "" if row.policy == "-" else f" at {row.policy}"
        reasons.append(f"{row.check}{policy}: {row.detail}" if row.status == "fail" else row.detail)
    if not rows:
        reasons = ["the file is not loaded"]
    mark = "fail" if failed else "pass" if passed else "skip"
    return Cell(MARKS[mark], [*dict.fromkeys(reasons)])


def markdown(found: dict[str, list[Row]], absent: list[str], args: argparse.Namespace) -> str:
    """Returns the page."""
    lines = [
        "# Cases",
        "",
        "Every check on every ONNX file of a corpus of exports of real architectures. Made by `python tools cases`,",
        f"whose `--help` describes each column; policies {', '.join(args.policies)}.",
        "",
        "✓ all checks pass; – some checks could not run, for the reason below; ✗ a check fails.",
        "",
        "| file | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    notes: dict[str, list[str]] = {}
    for label, rows in found.items():
        cells = []
        for name in COLUMNS:
            made = cell([r for r in rows if column(r.check) == name])
            for reason in made.reasons:
                notes.setdefault(f"{name}: {reason}", []).append(label)
            number = "".join(f"<sup>{list(notes).index(f'{name}: {r}') + 1}</sup>" for r in made.reasons)
            cells.append(made.mark + number)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "## Reasons", ""]
    for i, reason in enumerate(notes, 1):
        lines.append(f"{i}. {tidy(reason)}")
    if absent:
        lines += ["", "## Cases without an ONNX file", ""] + [f"- {line}" for line in absent]
    return "\n".join(lines) + "\n"


def tidy(reason: str) -> str:
    """Returns a message as one line of Markdown, without paths of this machine."""
    text = re.sub(r"(/[\w.-]+){3,}/", "", " ".join(reason.split()))
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def without_file(folder: Path, only: list[str]) -> list[str]:
    """Returns the cases without any ONNX file, and the exporters' messages."""
    lines = []
    for case in sorted(folder.iterdir()):
        record = case / "record.json"
        if (only and case.name not in only) or any(case.glob("*.onnx")) or not record.is_file():
            continue
        exports = json.loads(record.read_text())["exports"]
        said = [f"{name}: {first_cause(made.get('error', ''))}" for name, made in exports.items() if "error" in made]
        lines.append(f"{case.name}: the exporters refuse it ({'; '.join(said)})")
    return lines


def first_cause(error: str) -> str:
    """Returns the part of an exporter's message that gives the cause."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", error)
    return f"no ONNX function for {found[1]}" if found else tidy(error.splitlines()[0])


def read_rows(path: Path | None) -> dict[str, list[Row]]:
    """Returns the rows of complete files, by file."""
    found: dict[str, list[Row]] = {}
    if path and path.is_file():
        for line in path.read_text().splitlines():
            rows = [Row(**row) for row in json.loads(line)]
            found[rows[0].case] = rows
    return found


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_cases(parser, files="all")
    parser.add_argument("--policies", type=options.words, default=list(POLICIES))
    options.add_cache(parser)
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--rows", type=Path, help="every check as JSON lines; continued if it is there")
    options.add_page(parser)
    args = parser.parse_args()
    having = [
        f.name for f in args.corpus.iterdir() if (not args.case or f.name in args.case) and list(f.glob("*.onnx"))
    ]
    cases, generator = find_cases(args.corpus, having, args.file), load_generator(args.corpus)
    found = read_rows(args.rows)

    def checked(case: Case) -> list[Row]:
        if case.label not in found:
            found[case.label] = check_file(case, argparse.Namespace(**vars(args)), generator)
            if args.rows:
                with args.rows.open("a") as rows:
                    rows.write(json.dumps([asdict(row) for row in found[case.label]]) + "\n")
        return found[case.label]

    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip((case.label for case in cases), pool.map(checked, cases)))
    page = markdown(results, without_file(args.corpus, args.case), args)
    if args.page:
        args.page.write_text(page)
    else:
        print(page, end="")
    return 1 if any(row.status == "fail" for rows in results.values() for row in rows) else 0
