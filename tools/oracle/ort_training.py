"""Trains the folder that `--to ort-training` writes with ONNX Runtime's on-device training, and compares the result.

Needs onnxruntime-training 1.19.2, which excludes onnxruntime: an environment of its own with Python 3.11.

    python3.11 -m venv ort && ort/bin/pip install onnxruntime-training==1.19.2
    ort/bin/python tools ort_training DIR --inputs batch.npz --lr 0.01 --expect run.npz

`run.npz` holds what `ckpt-opt run --steps N --outputs run.npz` left of the same graph with `--optimizer adamw`: the loss
of the last step, and the parameters as `NAME.updated`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

# Of the largest element of a parameter, or of the loss.
TOLERANCE = 1e-5


def training_api() -> Any:
    """Returns `onnxruntime.training.api`. The package around it imports PyTorch, which a device does not need."""
    runtime = importlib.import_module("onnxruntime")
    package = types.ModuleType("onnxruntime.training")
    package.__path__ = [str(Path(str(runtime.__file__)).parent / "training")]
    sys.modules[package.__name__] = package
    return importlib.import_module("onnxruntime.training.api")


def status(word: str) -> int:
    """Returns a number of this process in bytes, such as VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{word}:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with the four files")
    parser.add_argument("--inputs", type=Path, required=True, help="npz with the model's inputs, repeated in each step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--expect", type=Path, help="npz to compare with; without it nothing is compared")
    parser.add_argument("--keep-recomputation", action="store_true", help="keep recompute nodes, and the file's order")
    args = parser.parse_args()

    api = training_api()
    ort = importlib.import_module("onnxruntime")
    ort.set_default_logger_severity(3)
    options = ort.SessionOptions()
    if args.keep_recomputation:
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.add_session_config_entry("optimization.disable_specified_optimizers", "CommonSubexpressionElimination")
    state = api.CheckpointState.load_checkpoint(str(args.folder / "checkpoint"))
    files = [str(args.folder / name) for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")]
    module = api.Module(files[0], state, files[1], session_options=options)
    optimizer = api.Optimizer(files[2], module)
    optimizer.set_learning_rate(args.lr)
    inputs = np.load(args.inputs)
    batch = [inputs[name] for name in module.input_names()]
    before = status("VmRSS")
    losses = []
    added = 0
    for _ in range(args.steps):
        module.train()
        outputs = module(*batch)
        # Of the first one: gradients and activations, but no states of the optimizer.
        added = added or status("VmHWM") - before
        losses.append(float(np.ravel(outputs[0] if isinstance(outputs, tuple) else outputs)[0]))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    outputs = module(*batch)
    final = float(np.ravel(outputs[0] if isinstance(outputs, tuple) else outputs)[0])
    print(f"losses {losses}, then {final} in eval_model.onnx")
    print(f"training_model.onnx added {added / 2**20:.0f} MiB to the process")
    if not losses[0] > losses[-1] > final:
        print("the loss does not fall", file=sys.stderr)
        return 1
    return compare(state, losses[-1], np.load(args.expect)) if args.expect else 0


def compare(state: Any, loss: float, expected: Any) -> int:
    """Compares the last loss and all trained parameters. Returns the exit code."""
    wanted = {name.removesuffix(".updated"): expected[name] for name in expected if name.endswith(".updated")}
    wanted = {name: value for name, value in wanted.items() if not name.endswith((".exp_avg", ".exp_avg_sq"))}
    found = {name: parameter.data for name, parameter in state.parameters if parameter.requires_grad}
    if found.keys() != wanted.keys():
        print(f"other parameters: {sorted(found.keys() ^ wanted.keys())}", file=sys.stderr)
        return 1
    worst = abs(loss - float(expected["loss"])) / abs(loss), "loss"
    for name, value in wanted.items():
        worst = max(worst, (float(np.abs(found[name] - value).max() / np.abs(value).max()), name))
    print(f"{len(wanted)} parameters and the loss: largest relative difference {worst[0]:.2e}, in {worst[1]}")
    return int(worst[0] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
