#!/usr/bin/env python3
"""Print what ckpt-opt finds of the attentions in every ONNX file of a corpus folder.

    python tools/attentions.py --ckpt-opt target/release/ckpt-opt CORPUS [--case a,b]

CORPUS holds one folder a case, with ONNX files in it. Each file is inspected twice: as it is, and with every name and
all metadata taken out (strip.py), which must give the same table. Where a case's config.json or record.json names
heads, KV heads, window or the number of layers, the table must agree. Exit 0 if all do, 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

from strip import strip

FIELDS = ("heads", "kv_heads", "head_size", "window", "causal", "mask", "scale", "softcap", "form", "obstacle")
EXPECTED = {
    "heads": ("num_attention_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "window": ("sliding_window",),
}
LAYERS = ("num_hidden_layers", "n_layer", "layers")


def inspect(program: str, model: Path) -> list[dict]:
    """The attention table of one file."""
    done = subprocess.run([program, "inspect", str(model), "--format", "json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[0])
    return json.loads(done.stdout)["attentions"]


def stated(folder: Path) -> dict[str, int]:
    """What a case says of itself: numbers under the first of the known keys, wherever they stand."""
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
    """Where the table contradicts the case."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--ckpt-opt", required=True, metavar="PROGRAM")
    parser.add_argument("--case", help="only these, separated by commas")
    args = parser.parse_args()
    wanted = args.case.split(",") if args.case else None
    bad = 0
    for folder in sorted(p for p in args.corpus.iterdir() if p.is_dir()):
        if wanted and folder.name not in wanted:
            continue
        said = stated(folder)
        for model in sorted(folder.glob("*.onnx")):
            place = f"{folder.name}/{model.name}"
            try:
                table = inspect(args.ckpt_opt, model)
                with tempfile.TemporaryDirectory() as scratch:
                    bare = Path(scratch) / "bare.onnx"
                    stripped = strip(onnx.load(model, load_external_data=False))
                    bare.write_bytes(stripped.SerializeToString())
                    other = inspect(args.ckpt_opt, bare)
            except RuntimeError as error:
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


if __name__ == "__main__":
    sys.exit(main())
