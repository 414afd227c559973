"""Compares the files that two builds of ckpt-opt write, byte for byte.

    python tools parity --before OLD/ckpt-opt --after target/release/ckpt-opt [--corpus DIR] [--case a,b] [--jobs 2]
    python tools parity --before OLD/ckpt-opt --save before.json
    python tools parity --before-file before.json --after target/release/ckpt-opt

Every model of the fixtures (or of --corpus) is optimized by 8 policies and 3 budgets with both builds. Equal means:
  - the same exit code, and for a refusal the same numbers of bytes;
  - the same bytes of the written file and its sidecar, once `RENAMED` is applied to the strings of the older file;
  - the same peaks, overheads, bounds and smallest budget in the report.
`--save` keeps digests of the older build, so that a later comparison need not run it again.

Exit code 0 if everything is equal, 1 otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx

from tools.lib import options
from tools.lib.compiler import missing_inputs
from tools.lib.reference import find_models

BUDGETS = ("80%", "60%", "40%")
NUMBERS = (
    "budget_bytes",
    "peak_before_bytes",
    "peak_after_bytes",
    "static_bytes",
    "saved_bytes",
    "recompute_flops",
    "forward_backward_flops",
    "overhead_pct",
    "lower_bound_pct",
    "gap_pct",
    "smallest_feasible_bytes",
)
# Strings in written files whose spelling has changed: (pattern, replacement), applied in order.
RENAMED = [
    (re.compile(r"/again\b"), "/recompute"),
    (re.compile(r"^full --(every|first) (\d+)$"), r"\1:\2"),
]
# Policies whose spelling has changed, newest first; the first that a build accepts is used.
SPELLINGS = {
    "every:2": ["full --every 2", "every:2"],
    "first:1": ["full --first 1", "first:1"],
}


def rename(message) -> None:
    """Applies `RENAMED` to every string field of a protobuf message, recursively."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for item in value if field.is_repeated else [value]:
                rename(item)
        elif field.type == field.TYPE_STRING:
            if field.is_repeated:
                value[:] = [renamed(text) for text in value]
            else:
                setattr(message, field.name, renamed(value))


def renamed(text: str) -> str:
    for pattern, replacement in RENAMED:
        text = pattern.sub(replacement, text)
    return text


def digest(folder: Path) -> dict[str, str]:
    """Returns digests of the files in a folder; of an ONNX file after `RENAMED`."""
    found = {}
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        if file.suffix == ".onnx":
            model = onnx.ModelProto()
            model.ParseFromString(data)
            rename(model)
            data = model.SerializeToString(deterministic=True)
        found[file.name] = hashlib.sha256(data).hexdigest()
    return found


def optimize(binary: str, model: Path, kind: str, value: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.onnx"
        for spelling in SPELLINGS.get(value, [value]):
            command = [
                binary,
                "optimize",
                str(model),
                "-o",
                str(out),
                kind,
                *spelling.split(),
                "--format",
                "json",
                *missing_inputs(model),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 2:
                break
        if done.returncode:
            numbers = re.findall(r"\b\d{4,}\b", done.stdout)
            return {"exit": done.returncode, "numbers": numbers if done.returncode == 3 else []}
        report = json.loads(done.stdout)
        return {"exit": 0, "numbers": {n: report.get(n) for n in NUMBERS}, "files": digest(Path(folder))}


def sweep(binary: str, models: list[tuple[str, Path]], jobs: int) -> dict[str, dict]:
    names = {spellings[0]: name for name, spellings in SPELLINGS.items()}
    wanted = [("--policy", names.get(p, p)) for p in options.POLICIES] + [("--budget", b) for b in BUDGETS]
    calls = [(f"{name} {kind} {value}", path, kind, value) for name, path in models for kind, value in wanted]
    with ThreadPoolExecutor(jobs) as pool:
        answers = pool.map(lambda c: optimize(binary, *c[1:]), calls)
        return {call[0]: answer for call, answer in zip(calls, answers, strict=True)}


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--before", help="the older binary")
    parser.add_argument("--before-file", type=Path, help="digests that --save wrote")
    parser.add_argument("--after", help="the newer binary")
    parser.add_argument("--save", type=Path, help="write the digests of --before to this file")
    options.add_cases(parser, corpus=options.FIXTURES, files="all")
    options.add_counts(parser, jobs=2)
    args = parser.parse_args()
    if not (args.before or args.before_file) or not (args.after or args.save):
        parser.error("give --before or --before-file, and --after or --save")

    models = find_models(args.corpus, args.case, args.file)
    if args.before_file:
        before = json.loads(args.before_file.read_text())
    else:
        before = json.loads(json.dumps(sweep(args.before, models, args.jobs)))
    if args.save:
        args.save.write_text(json.dumps(before, indent=1))
    if not args.after:
        return 0
    after = json.loads(json.dumps(sweep(args.after, models, args.jobs)))
    different = 0
    for call, answer in after.items():
        if answer != before.get(call):
            different += 1
            print(f"differs: {call}\n  before {before.get(call)}\n  after  {answer}")
    refused = sum(a["exit"] != 0 for a in after.values())
    print(f"{len(models)} models, {len(after)} plans ({refused} refused by both): {different} differ")
    return 1 if different else 0
