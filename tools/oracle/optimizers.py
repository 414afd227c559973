"""Compares optimizers in the graph with torch.optim and with ONNX Runtime, step by step.

    python tools optimizers --ckpt-opt BINARY [--steps 4]

Every optimizer and setting of SETTINGS trains two fixtures, one in float32 and one in bfloat16. Each step starts from the
result of the last one, at another learning rate. The reference receives the gradients that the graph computes, and clips them
by torch.nn.utils.clip_grad_norm_. Lion, which torch.optim lacks, is that of its publication (arXiv 2302.06675).

- float32: after each step, parameters and states agree with torch.optim within tolerance.py. torch.optim runs on its own
  from the first step. Both our runtime and ONNX Runtime are checked, with the same file.
- bfloat16: after each step, from the same state, the error against float64 is at most 1.1 times that of torch.optim, as a
  root mean square over each kind of tensor.

Needs tools/requirements-torch.txt. Exit code 0 if all agree.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import torch

from tools.lib import options
from tools.lib.compiler import Compiler, read_tensors
from tools.lib.onnx_runtime import run_session, session_of
from tools.lib.tolerance import HALF_PRECISION_FACTOR, Worst, compare, largest, measured, pick

UPDATED = ".updated"


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the publication."""

    def __init__(self, parameters, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                direction = (mean * beta1 + parameter.grad * (1 - beta1)).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                mean.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for matrices, AdamW for all else. The iteration keeps the type of the gradient, as ours does.

    `folded` are the matrices that a file holds transposed: their step is scaled by the framework's rows and columns.
    """

    def __init__(self, parameters, lr: float, tables: set[int], folded: set[int], **settings):
        groups = list(parameters)
        every = [p for group in groups for p in group["params"]]
        super().__init__(groups, {"lr": lr})
        is_matrix = [p.dim() == 2 and id(p) not in tables for p in every]
        decay = settings.get("weight_decay", 0.1)
        self.folded = [p for p in every if id(p) in folded]
        self.parts = [
            torch.optim.Muon([p for p, m in zip(every, is_matrix, strict=True) if m], lr=lr, **settings),
            torch.optim.AdamW([p for p, m in zip(every, is_matrix, strict=True) if not m], lr=lr, weight_decay=decay),
        ]

    def step(self, closure=None) -> None:
        cast = torch.Tensor.bfloat16
        torch.Tensor.bfloat16 = torch.Tensor.clone
        try:
            self.turn()
            for part in self.parts:
                part.param_groups[0]["lr"] = self.param_groups[0]["lr"]
                part.step()
                self.state.update(part.state)
        finally:
            torch.Tensor.bfloat16 = cast
            self.turn()

    def turn(self) -> None:
        """Turns the folded matrices, with all that belongs to them, to the framework's side or back."""
        for p in self.folded:
            gradient = p.grad
            p.grad = None
            p.data = p.data.T
            p.grad = gradient.T
            self.state[p].update({n: t.T for n, t in self.state[p].items() if t.dim() == 2})


# Ours, and what torch.optim calls it; further options, which `Reference` follows.
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
OPTIONS = [
    ("adamw", torch.optim.AdamW, {}, ("--clip", "0.5")),
    ("sgd:momentum=0.9", torch.optim.SGD, {"momentum": 0.9}, ("--clip", "2")),
    ("adamw:weight_decay=0.1", torch.optim.AdamW, {"weight_decay": 0.1}, ("--no-decay-vectors",)),
    ("lion", Lion, {}, ()),
    ("lion:beta1=0.95,beta2=0.98,weight_decay=0.1", Lion, {"betas": (0.95, 0.98), "weight_decay": 0.1}, ()),
    ("adafactor", torch.optim.Adafactor, {}, ()),
    (
        "adafactor:beta2_decay=-0.5,d=2,weight_decay=0.1",
        torch.optim.Adafactor,
        {"beta2_decay": -0.5, "d": 2.0, "weight_decay": 0.1},
        (),
    ),
    ("muon", Muon, {}, ()),
    (
        "muon:momentum=0.9,nesterov=false,match_rms_adamw=true",
        Muon,
        {"momentum": 0.9, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        (),
    ),
]
STATES = {
    ".momentum": "momentum_buffer",
    ".exp_avg": "exp_avg",
    ".exp_avg_sq": "exp_avg_sq",
    ".row_var": "row_var",
    ".col_var": "col_var",
    ".variance": "variance",
}
# Words of the tables that the fixtures look up, and of the heads that are tied to them.
TABLES = ("wte", "wpe", "embed_tokens", "lm_head")
# How the exporter names a constant that it computed: in the fixtures the transpose of a linear layer's weight.
FOLDED = "val_"
MODELS = [("gpt2", "causal-lm"), ("llama32_bf16", "causal-lm")]
RATES = [1e-3, 1e-2, 3e-4, 2e-3]


def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float64)).to(dtype)


class Reference:
    """torch.optim over parameters of one type, with the options of ours."""

    def __init__(
        self, parameters: dict[str, np.ndarray], make, settings: dict, asked: tuple[str, ...], dtype: torch.dtype
    ):
        self.parameters = {n: torch.nn.Parameter(tensor(p, dtype)) for n, p in parameters.items()}
        self.dtype = dtype
        self.clip = float(asked[asked.index("--clip") + 1]) if "--clip" in asked else None
        groups: list[dict[str, Any]] = [{"params": list(self.parameters.values())}]
        if "--no-decay-vectors" in asked:
            vectors = [p for p in self.parameters.values() if p.dim() <= 1]
            groups[0]["params"] = [p for p in self.parameters.values() if p.dim() > 1]
            groups.append({"params": vectors, "weight_decay": 0.0})
        if make is Muon:
            named = self.parameters.items()
            settings = settings | {
                "tables": {id(p) for n, p in named if any(w in n for w in TABLES)},
                "folded": {id(p) for n, p in named if n.startswith(FOLDED)},
            }
        self.optimizer = make(groups, lr=1.0, **settings)

    def step(self, gradients: dict[str, np.ndarray], lr: float) -> dict[str, np.ndarray]:
        """Returns parameters and states under our names."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            parameter.grad = tensor(gradients[name], self.dtype)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
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
                        self.optimizer.state[parameter][theirs].copy_(
                            tensor(tensors[name + ours + UPDATED], self.dtype)
                        )


def judge_narrow(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> Worst:
    """Compares root mean squares over all parameters, and over each kind of state."""
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
    """Trains: yields number, learning rate, gradients and updates of each step. `run` maps inputs to outputs."""
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
    words, make, settings, asked = setting
    if make is torch.optim.Adafactor:
        # By default it is the epsilon of the parameters' type, also where the reference computes in a wider one.
        own = torch.bfloat16 if model.endswith("bf16") else torch.float32
        settings = settings | {"eps": (torch.finfo(own).eps, 1e-3)}
    train = folder / "train.onnx"
    optimizing = Compiler(
        compiler.binary, options=("--optimizer", words, *asked, "--drop-output", "*", "--weights-as-inputs")
    )
    optimizing.optimize(options.FIXTURES / model / "model.onnx", train, "none", loss, {"batch": 2, "seq": 8})
    case = read_tensors(options.FIXTURES / model / "case.npz")
    inspected = compiler.inspect(train)
    wanted = {port["name"] for port in inspected["inputs"]}
    given = {n.removeprefix("in."): t for n, t in case.items() if n.startswith("in.")}
    given["labels"] = given["input_ids"]
    feeds = {n: t for n, t in given.items() if n in wanted} | state_zeros(inspected)
    counts = "step" in wanted

    def in_ours(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return compiler.run_tensors(train, tensors, folder)

    rows: list[tuple[str, Worst]] = []
    start = initial(train)
    if model.endswith("bf16"):
        reference, exact = (Reference(start, make, settings, asked, t) for t in (torch.bfloat16, torch.float64))
        for step, lr, gradients, updates in steps_of(in_ours, feeds, counts, steps):
            results = (judged.step(gradients, lr) for judged in (reference, exact))
            rows.append((f"step {step}", judge_narrow(updates, *results)))
            reference.load(updates)
            exact.load(updates)
        return rows
    session = session_of(train)

    def in_onnxruntime(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return run_session(session, tensors)

    # Each goes its own way, by its own gradients.
    for name, run in (("ours", in_ours), ("ONNX Runtime", in_onnxruntime)):
        reference = Reference(start, make, settings, asked, torch.float32)
        for step, lr, gradients, updates in steps_of(run, feeds, counts, steps):
            wanted_updates = reference.step(gradients, lr)
            rows.append((f"{name}, step {step}", compare(updates, wanted_updates, largest(wanted_updates))))
    return rows


def state_zeros(inspected: dict) -> dict[str, np.ndarray]:
    """Returns the states before the first step, with the types that `inspect` reports."""
    kinds = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
    ports = [p for p in inspected["inputs"] if p["name"].endswith(tuple(STATES))]
    return {p["name"]: np.zeros(p["shape"], kinds[p["dtype"]]) for p in ports}


def initial(train: Path) -> dict[str, np.ndarray]:
    """Returns the trained parameters as stored in the file."""
    graph = onnx.load(train).graph
    trained = {o.name.removesuffix(".grad") for o in graph.output if o.name.endswith(".grad")}
    stored = {t.name: t for t in graph.initializer if t.name in trained}
    return {n: np.asarray(onnx.numpy_helper.to_array(t)).astype(np.float64) for n, t in stored.items()}


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    compiler = Compiler(arguments.ckpt_opt)
    failed = 0
    for model, loss in MODELS:
        for setting in [*((*plain, ()) for plain in SETTINGS), *OPTIONS]:
            with tempfile.TemporaryDirectory() as folder:
                rows = trial(compiler, model, loss, setting, arguments.steps, Path(folder))
            bad = [(label, worst) for label, worst in rows if worst.problem or worst.ratio > 1.0]
            failed += bool(bad)
            top = pick([worst for _, worst in rows])
            print(f"{'fail' if bad else 'pass'}  {model:14} {' '.join([setting[0], *setting[3]]):60} worst {top}")
            for label, worst in bad:
                print(f"      {label}: {worst}")
    return 1 if failed else 0
