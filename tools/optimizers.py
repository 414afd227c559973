#!/usr/bin/env python3
"""Compares optimizers in the graph with torch.optim and with ONNX Runtime, step by step.

    python tools/optimizers.py --binary target/release/ckpt-opt [--steps 4]

Every optimizer and setting of `SETTINGS` trains two fixtures for some steps, one in float32 and one in bfloat16, each step
from what the last one left, at another learning rate. The reference is given the gradients that the graph makes.

- float32: parameters and states after each step are those of torch.optim, which went its own way from the first step
  on, within tools/tolerance.py; for our runtime, and for ONNX Runtime with the same file.
- bfloat16: after each step, from the same state: the error against float64 is at most 1.1 times that of torch.optim, as
  a root mean square over each kind of tensor.

Exit 0 if all hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import torch
from compiler import Compiler, read_tensors, write_tensors
from tolerance import HALF_PRECISION_FACTOR, Worst, compare, largest, measured, pick

ROOT = Path(__file__).resolve().parent.parent
UPDATED = ".updated"
# Ours, and what torch.optim calls it.
SETTINGS = [
    ("sgd", torch.optim.SGD, {}),
    ("sgd:weight_decay=0.1", torch.optim.SGD, {"weight_decay": 0.1}),
    ("sgd:momentum=0.9", torch.optim.SGD, {"momentum": 0.9}),
    (
        "sgd:momentum=0.9,dampening=0.5,weight_decay=0.1",
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    ),
    (
        "sgd:momentum=0.9,nesterov=true,weight_decay=0.1",
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    ("adamw", torch.optim.AdamW, {}),
    (
        "adamw:beta1=0.8,beta2=0.95,eps=1e-6,weight_decay=0",
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ),
]
STATES = {".momentum": "momentum_buffer", ".exp_avg": "exp_avg", ".exp_avg_sq": "exp_avg_sq"}
MODELS = [("gpt2", "causal-lm"), ("llama32_bf16", "causal-lm")]
RATES = [1e-3, 1e-2, 3e-4, 2e-3]


def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float64)).to(dtype)


class Reference:
    """torch.optim over parameters of some type."""

    def __init__(self, parameters: dict[str, np.ndarray], make, settings: dict, dtype: torch.dtype):
        self.parameters = {n: torch.nn.Parameter(tensor(p, dtype)) for n, p in parameters.items()}
        self.dtype = dtype
        self.optimizer = make(self.parameters.values(), lr=1.0, **settings)

    def step(self, gradients: dict[str, np.ndarray], lr: float) -> dict[str, np.ndarray]:
        """Parameters and states under our names."""
        self.optimizer.param_groups[0]["lr"] = lr
        for name, parameter in self.parameters.items():
            parameter.grad = tensor(gradients[name], self.dtype)
        self.optimizer.step()
        after = {}
        for name, parameter in self.parameters.items():
            after[name + UPDATED] = parameter.detach().double().numpy().copy()
            for ours, theirs in STATES.items():
                state = self.optimizer.state[parameter].get(theirs)
                if state is not None:
                    after[name + ours + UPDATED] = state.double().numpy().copy()
        return after

    def load(self, tensors: dict[str, np.ndarray]) -> None:
        """Continues from our parameters and states."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensor(tensors[name + UPDATED], self.dtype))
                for ours, theirs in STATES.items():
                    if theirs in self.optimizer.state[parameter]:
                        self.optimizer.state[parameter][theirs].copy_(tensor(tensors[name + ours + UPDATED], self.dtype))


def judge_narrow(
    ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> Worst:
    """Root mean squares over all parameters, and over each kind of state."""
    errors: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for name, reference in exact.items():
        kind = next((s for s in STATES if name.endswith(s + UPDATED)), "parameters")
        for side, results in zip(errors.setdefault(kind, ([], [])), (ours, theirs), strict=True):
            side.append((results[name].astype(np.float64) - reference).ravel())
    rows = []
    for kind, sides in errors.items():
        own, other = (float(np.sqrt(np.mean(np.concatenate(e) ** 2))) for e in sides)
        rows.append(measured(kind, own, HALF_PRECISION_FACTOR * other))
    return pick(rows)


def steps_of(run, feeds: dict[str, np.ndarray], counts: bool, steps: int):
    """Trains: yields number, learning rate, gradients and updates of each step. `run` makes outputs of inputs."""
    for step in range(1, steps + 1):
        lr = np.float32(RATES[(step - 1) % len(RATES)])
        number = {"step": np.array(step, np.int64)} if counts else {}
        found = run(feeds | {"lr": np.array(lr, np.float32)} | number)
        gradients = {n.removesuffix(".grad"): t for n, t in found.items() if n.endswith(".grad")}
        updates = {n: t for n, t in found.items() if n.endswith(UPDATED)}
        yield step, float(lr), gradients, updates
        feeds = feeds | {n.removesuffix(UPDATED): t for n, t in updates.items()}


def trial(
    compiler: Compiler, model: str, loss: str, setting: tuple, steps: int, folder: Path
) -> list[tuple[str, Worst]]:
    words, make, settings = setting
    train = folder / "train.onnx"
    optimizing = Compiler(compiler.binary, options=("--optimizer", words, "--drop-output", "*"))
    optimizing.optimize(ROOT / "fixtures" / model / "model.onnx", train, "none", loss, {"batch": 2, "seq": 8})
    case = read_tensors(ROOT / "fixtures" / model / "case.npz")
    inspected = compiler.inspect(train)
    wanted = {port["name"] for port in inspected["inputs"]}
    given = {n.removeprefix("in."): t for n, t in case.items() if n.startswith("in.")}
    given["labels"] = given["input_ids"]
    feeds = {n: t for n, t in given.items() if n in wanted} | state_zeros(inspected)
    counts = "step" in wanted

    def in_ours(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs, outputs = folder / "in.safetensors", folder / "out.safetensors"
        write_tensors(inputs, tensors)
        compiler.run(train, inputs, outputs)
        return read_tensors(outputs)

    rows: list[tuple[str, Worst]] = []
    start = initial(train)
    if model.endswith("bf16"):
        reference, exact = (Reference(start, make, settings, t) for t in (torch.bfloat16, torch.float64))
        for step, lr, gradients, updates in steps_of(in_ours, feeds, counts, steps):
            results = (judged.step(gradients, lr) for judged in (reference, exact))
            rows.append((f"step {step}", judge_narrow(updates, *results)))
            reference.load(updates)
            exact.load(updates)
        return rows
    session = onnxruntime.InferenceSession(train, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def in_onnxruntime(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(None, tensors), strict=True))

    # Each goes its own way, by its own gradients.
    for name, run in (("ours", in_ours), ("ONNX Runtime", in_onnxruntime)):
        reference = Reference(start, make, settings, torch.float32)
        for step, lr, gradients, updates in steps_of(run, feeds, counts, steps):
            wanted_updates = reference.step(gradients, lr)
            rows.append((f"{name}, step {step}", compare(updates, wanted_updates, largest(wanted_updates))))
    return rows


def state_zeros(inspected: dict) -> dict[str, np.ndarray]:
    """States before the first step; the types are those of the inspection."""
    kinds = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
    ports = [p for p in inspected["inputs"] if p["name"].endswith(tuple(STATES))]
    return {p["name"]: np.zeros(p["shape"], kinds[p["dtype"]]) for p in ports}


def initial(train: Path) -> dict[str, np.ndarray]:
    """The trained parameters as the file has them."""
    graph = onnx.load(train).graph
    trained = {o.name.removesuffix(".grad") for o in graph.output if o.name.endswith(".grad")}
    stored = {t.name: t for t in graph.initializer if t.name in trained}
    return {n: np.asarray(onnx.numpy_helper.to_array(t)).astype(np.float64) for n, t in stored.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    compiler = Compiler(arguments.binary.resolve())
    onnxruntime.set_default_logger_severity(3)
    failed = 0
    for model, loss in MODELS:
        for setting in SETTINGS:
            with tempfile.TemporaryDirectory() as folder:
                rows = trial(compiler, model, loss, setting, arguments.steps, Path(folder))
            bad = [(label, worst) for label, worst in rows if worst.problem or worst.ratio > 1.0]
            failed += bool(bad)
            top = pick([worst for _, worst in rows])
            print(f"{'fail' if bad else 'pass'}  {model:14} {setting[0]:50} worst {top}")
            for label, worst in bad:
                print(f"      {label}: {worst}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
