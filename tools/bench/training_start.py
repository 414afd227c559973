"""Measures how a run of `train` on a model of a billion parameters starts: seconds and resident memory against the prediction.

    python tools training_start --ckpt-opt BINARY [--layers 28] [--steps 12]

The model is made in a temporary folder: a table of 32000 × 2048 and layers of two matrices (2048 × 8192) of random numbers, with
its weights in a file beside it (4 GB). SGD updates each parameter as soon as its gradient is complete, so the peak is little
more than the parameters. Printed are the seconds from the start of the process to the first step, the growth of the
process's own memory until the first checkpoint, the predicted peak, and what steps waited for data and checkpoints. One checkpoint is saved
halfway, beside the steps after it, and one after the last step. All needs three times the weights on the disk (12 GB).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from tools.lib import options

HIDDEN, INNER, VOCABULARY, SEQUENCE = 2048, 8192, 32000, 16
WEIGHTS = "model.onnx.data"


def write(folder: Path, layers: int) -> int:
    """Writes the model and tokens. Returns the number of parameters."""
    noise = np.random.default_rng(0).standard_normal(VOCABULARY * HIDDEN).astype(np.float32)
    made: list[TensorProto] = []
    end = 0
    with (folder / WEIGHTS).open("wb") as data:

        def weight(name: str, rows: int, columns: int) -> None:
            nonlocal end
            # No two alike: equal weights would be taken for one.
            (noise[: rows * columns] * np.float32(0.004 + 2e-5 * len(made))).tofile(data)
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[rows, columns])
            tensor.data_location = TensorProto.EXTERNAL
            length = 4 * rows * columns
            for key, value in (("location", WEIGHTS), ("offset", str(end)), ("length", str(length))):
                tensor.external_data.add(key=key, value=value)
            end += length
            made.append(tensor)

        weight("table", VOCABULARY, HIDDEN)
        nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x0"])]
        for i in range(layers):
            weight(f"up{i}", HIDDEN, INNER)
            weight(f"down{i}", INNER, HIDDEN)
            nodes += [
                helper.make_node("MatMul", [f"x{i}", f"up{i}"], [f"h{i}"]),
                helper.make_node("Relu", [f"h{i}"], [f"r{i}"]),
                helper.make_node("MatMul", [f"r{i}", f"down{i}"], [f"d{i}"]),
                helper.make_node("Add", [f"x{i}", f"d{i}"], [f"x{i + 1}"]),
            ]
    nodes.append(helper.make_node("Transpose", ["table"], ["head"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", [f"x{layers}", "head"], ["logits"]))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "seq", VOCABULARY])
    graph = helper.make_graph(nodes, "large", [ids], [logits], made)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    np.random.default_rng(1).integers(0, VOCABULARY, 4096).astype(np.uint16).tofile(folder / "tokens.bin")
    return end // 4


def own_bytes(process: int) -> int:
    """Returns the resident memory of a process that is no page of a file; 0 once it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in text.splitlines() if line.startswith("RssAnon")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_counts(parser, layers=28, steps=12)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write(folder, asked.layers)
        half = asked.steps // 2
        command = [
            str(asked.ckpt_opt), "train", "model.onnx", "--loss", "causal-lm", "--data", "tokens.bin", "--dim", "batch=1",
            "--dim", f"seq={SEQUENCE}", "--policy", "full", "--optimizer", "sgd", "--lr", "1e-9", "--out", "out",
            "--steps", str(asked.steps), "--save-every", str(half), "--trace", "trace.json", "--format", "json",
        ]  # fmt: skip
        begun, most, base = time.monotonic(), 0, 0
        first = None
        metrics = folder / "out" / "metrics.jsonl"
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
            while run.poll() is None:
                lines = metrics.read_text().count("\n") if metrics.exists() else 0
                # What is copied for a checkpoint is no part of a step.
                if lines < half:
                    most = max(most, own_bytes(run.pid))
                if metrics.exists():
                    first = first or time.monotonic() - begun
                else:
                    base = own_bytes(run.pid)
                time.sleep(0.02)
            assert run.stdout is not None
            report = json.loads(run.stdout.read())
        predicted = report["predicted_peak_bytes"]
        saves = [
            e["dur"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["name"] == "save"
        ]
        print(f"{count} parameters")
        print(f"first step after {first or 0.0:.1f} s")
        print(f"own memory {most - base} bytes above that before the weights were copied, {predicted} predicted")
        print(f"peak {report['peak_bytes']} measured, {predicted} predicted")
        print(f"waited {100 * report['data_seconds'] / report['seconds']:.3f} % of {report['seconds']:.1f} s for data")
        for which, waited in zip(("halfway", "at the end"), saves, strict=False):
            print(
                f"waited {waited / 1e6:.2f} s for the checkpoint {which}: {waited / 1e6 / (4 * count / 1e9):.2f} s per GB"
            )
    return 0 if report["peak_bytes"] == predicted else 1
