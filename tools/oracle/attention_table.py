"""Checks the attentions that `inspect` finds in every ONNX file of a corpus.

    python tools attention_table --ckpt-opt BINARY CORPUS [--case a,b]

CORPUS holds one folder for each case, with ONNX files in it. Each file is inspected twice: as it is, and without names
and metadata (strip.py). Both tables must be equal. Where a case's config.json or record.json states heads, KV heads,
window or number of layers, the table must agree. Exit code 0 if all do, else 1.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import onnx

from tools.lib import options
from tools.lib.compiler import Compiler, Refused
from tools.oracle.strip import strip

FIELDS = ("heads", "kv_heads", "head_size", "window", "causal", "mask", "scale", "softcap", "form", "obstacle")
EXPECTED = {
    "heads": ("num_attention_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "window": ("sliding_window",),
}
LAYERS = ("num_hidden_layers", "n_layer", "layers")


def inspect(compiler: Compiler, model: Path) -> list[dict]:
    """Returns the attention table of one file."""
    return compiler.inspect(model)["attentions"]


def stated(folder: Path) -> dict[str, int]:
    """Returns what a case states about itself: numbers under the first of the known keys, wherever they are."""
    found: dict[str, int] = {}

    def visit(entry: object) -> None:
        if isinstance(entry, dict):
            for key, value in entry.items():
                if isinstance(value, int) and not isinstance(value, bool):
                    found.setdefault(key, value)
                visit(value)
        elif isinstance(entry, list):
            for value in entry:
                visit(value)

    for name in ("config.json", "record.json"):
        path = folder / name
        if path.exists():
            visit(json.loads(path.read_text()))
    return found


def problems(table: list[dict], said: dict[str, int]) -> list[str]:
    """Returns the contradictions between the table and the case."""
    wrong = []
    for field, keys in EXPECTED.items():
        expected = next((said[key] for key in keys if key in said), None)
        if expected is not None and any(row[field] != expected for row in table):
            wrong.append(f"{field} should be {expected}")
    layers = next((said[key] for key in LAYERS if key in said), None)
    if layers is not None and len(table) != layers:
        wrong.append(f"{len(table)} attentions, {layers} layers")
    return wrong


def line(row: dict) -> str:
    notes = ["causal"] if row["causal"] else []
    notes += [f"window {row['window']}"] if row["window"] else []
    notes += [f"mask {row['mask']}", f"scale {row['scale']}"]
    notes += [f"softcap {row['softcap']}"] if row["softcap"] else []
    notes += [row["form"]] + ([row["obstacle"]] if row["obstacle"] else [])
    return f"{row['heads']} heads of {row['head_size']}, {row['kv_heads']} for keys: {', '.join(notes)}"


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--case", type=options.words, default=[], help="comma-separated case names")
    args = parser.parse_args()
    compiler, bad = Compiler(args.ckpt_opt), 0
    for folder in sorted(p for p in args.corpus.iterdir() if p.is_dir()):
        if args.case and folder.name not in args.case:
            continue
        said = stated(folder)
        for model in sorted(folder.glob("*.onnx")):
            place = f"{folder.name}/{model.name}"
            try:
                table = inspect(compiler, model)
                with tempfile.TemporaryDirectory() as scratch:
                    bare = Path(scratch) / "bare.onnx"
                    stripped = strip(onnx.load(model, load_external_data=False))
                    bare.write_bytes(stripped.SerializeToString())
                    other = inspect(compiler, bare)
            except Refused as error:
                bad += 1
                print(f"FAIL {place}: {error}")
                continue
            wrong = problems(table, said)
            if [[row[f] for f in FIELDS] for row in table] != [[row[f] for f in FIELDS] for row in other]:
                wrong.append("another table without names")
            bad += bool(wrong)
            print(f"{'FAIL' if wrong else 'ok  '} {place}: {len(table)} attentions {'; '.join(wrong)}".rstrip())
            for text in dict.fromkeys(line(row) for row in table):
                count = sum(line(row) == text for row in table)
                print(f"       {count} x {text}")
    return 1 if bad else 0
