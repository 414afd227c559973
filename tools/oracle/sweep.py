"""Exports every architecture of transformers and timm, and compares ckpt-opt with PyTorch on each file.

    python tools sweep --ckpt-opt BINARY --results FILE [--only a,b] [--family transformers,timm]
        [--group decoder,encoder,…] [--format pt2,onnx,onnx-raw,onnx-legacy,traced] [--dynamic] [--onnxruntime]
        [--memory-gib N] [--seconds N] [--retry-failed] [--list]

Builds a small model of each architecture from a configuration (tools/lib/shrink.py), with random weights; nothing is
downloaded. PyTorch exports it in each format, with fixed sizes, or with `--dynamic` with named ones, and differentiates it
with random cotangents. The columns of a result:

  exported   PyTorch writes a file, and the exported program computes what the model computes
  imported   `inspect` and `optimize --policy none` read it
  gradients  equal: outputs and all gradients are PyTorch's, under the names of its parameters, in its layout or transposed as
             `inspect` says; with `--dynamic` at sizes other than those of the export.
             warned: a warning names each parameter that has no gradient. unnamed: gradients are right, but parameters are
             found by their contents only. Silent errors: different; missing, where no warning names a parameter; split, where
             copies of a parameter get a part each; stranger, where a constant gets a gradient
  planned    a plan of half the budget equals the unplanned graph bit for bit
  peak       the predicted peak is the measured one, unplanned and planned
  onnxruntime  with that option: ONNX Runtime runs the planned file, with its default optimization and with none, and agrees

A result is one line of JSON in FILE, appended at once. What FILE has already is skipped; `--retry-failed` repeats what has
failed. Every export runs in a process with a limit of memory and of CPU seconds. `sweep-table` makes a page of FILE. The most used
architectures come first. Exit code 0 if nothing is silently wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path

from tools.lib import options
from tools.lib.zoo import GROUPS, Architecture, architectures
from tools.oracle import sweep_job
from tools.oracle.sweep_job import FORMATS, Row

FAMILIES = ("transformers", "timm")
SILENT = ("different", "missing", "split", "stranger")


def read(path: Path) -> list[Row]:
    """Returns the last result of each model, format and sizes; none if there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = {(row["model"], row["format"], row["sizes"]): row for row in (json.loads(line) for line in lines)}
    built = {model for model, form, _ in rows if form != "-"}
    return [row for row in rows.values() if row["format"] != "-" or row["model"] not in built]


def failed(row: Row) -> bool:
    good = ("yes", "equal", "warned")
    return (
        "built" in row.get("cause", {})
        or any(row.get(c, "no") not in good for c in sweep_job.COLUMNS)
        or row.get(sweep_job.RUNTIME) == "no"
    )


def outstanding(
    architecture: Architecture, rows: list[Row], forms: list[str], dynamic: bool, retry: bool
) -> list[tuple[str, bool]]:
    """Returns the formats that have no result yet."""
    own = [row for row in rows if row["model"] == architecture.name and not (retry and failed(row))]
    if any(row["format"] == "-" for row in own):
        return []
    done = {(row["format"], row["sizes"]) for row in own}
    return [(form, dynamic) for form in forms if (form, "dynamic" if dynamic else "static") not in done]


def sweep_model(architecture: Architecture, jobs: list[tuple[str, bool]], args: argparse.Namespace) -> list[Row]:
    """Runs one model in a process of its own, which has a process for each format, and prints and stores each result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    limits = (args.memory_gib, args.seconds)
    process = context.Process(
        target=sweep_job.run_model, args=(architecture, jobs, args.ckpt_opt, args.onnxruntime, limits, theirs)
    )
    process.start()
    theirs.close()
    rows = []
    while True:
        if not ours.poll(2 * sweep_job.PATIENCE * args.seconds):
            process.kill()
            break
        try:
            row = ours.recv()
        except EOFError:
            break
        if row["format"] != "+":
            rows.append(row)
            store(row, args.results)
    process.join()
    for form, dynamic in [job for job in jobs if not rows or rows[0]["format"] != "-"][len(rows) :]:
        base = {"model": architecture.name, "family": architecture.family, "group": architecture.group}
        sizes = "dynamic" if dynamic else "static"
        cause = {"exported": f"the process of the model ended with {process.exitcode}"}
        rows.append(base | {"format": form, "sizes": sizes, "exported": "no", "cause": cause})
        store(rows[-1], args.results)
    return rows


def store(row: Row, results: Path) -> None:
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    columns = " ".join(f"{c}={row[c]}" for c in (*sweep_job.COLUMNS, sweep_job.RUNTIME) if c in row)
    cause = "; ".join(f"{c}: {text}" for c, text in row.get("cause", {}).items())
    print(f"{row['model']} {row['format']} {row['sizes']} {row.get('seconds', '')}s {columns} {cause}", flush=True)


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--ckpt-opt", type=options.binary, metavar="BINARY", help="the ckpt-opt binary")
    parser.add_argument("--results", type=Path, metavar="FILE", help="results, one JSON object per line")
    parser.add_argument("--only", type=options.words, default=[], help="comma-separated model types, or timm/MODULE")
    parser.add_argument("--family", type=options.words_of(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--group", type=options.words_of(GROUPS), default=list(GROUPS))
    parser.add_argument("--format", type=options.words_of(FORMATS), default=list(FORMATS))
    parser.add_argument("--onnxruntime", action="store_true", help="run planned files in ONNX Runtime as well")
    parser.add_argument("--dynamic", action="store_true", help="export with named sizes")
    parser.add_argument("--memory-gib", type=float, default=8.0, metavar="N", help="[default: 8]")
    options.add_counts(parser, seconds=120)
    parser.add_argument("--retry-failed", action="store_true", help="run failures again")
    parser.add_argument("--list", action="store_true", help="print the architectures and end")
    args = parser.parse_args()
    known = architectures(args.family)
    if unknown := sorted(set(args.only) - {a.name for a in known}):
        parser.error(f"no architecture {', '.join(unknown)}; --list prints all")
    chosen = [a for a in known if a.group in args.group and (not args.only or a.name in args.only)]
    if args.list:
        print("\n".join(f"{a.group}\t{a.name}\t{a.maker}" for a in chosen))
        return 0
    if args.ckpt_opt is None or args.results is None:
        parser.error("give --ckpt-opt and --results")
    silent = 0
    start_torch()
    for architecture in chosen:
        jobs = outstanding(architecture, read(args.results), args.format, args.dynamic, args.retry_failed)
        if jobs:
            rows = sweep_model(architecture, jobs, args)
            silent += sum(row.get("gradients") in SILENT for row in rows)
    print(f"{silent} silently wrong", file=sys.stderr)
    return 1 if silent else 0


def start_torch() -> None:
    """Imports what every process needs before it is forked, for one thread and no device.

    The first export takes seconds, because it imports modules. It is made here, before the first fork.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with sweep_job.quiet():
        torch.onnx.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), dynamo=True, verbose=False)
