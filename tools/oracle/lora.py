"""Compares adapters that `--lora` adds with LoRA written by hand in PyTorch, and exports with PyTorch and PEFT.

    python tools lora --ckpt-opt BINARY [--peft]

For every model and every exporter (dynamo, legacy, TorchScript, torch.export) the adapters get random weights. Then

- output and gradients of the training graph agree with PyTorch's within tolerance.py; in bfloat16, with adapters in bfloat16 and
  in float32, the error against float64 is at most 1.1 times PyTorch's, as a root mean square over all gradients,
- `convert --to safetensors` loads with `load_state_dict(strict=True)` and computes what PyTorch's adapters compute,
- `convert --to onnx` computes the same in ONNX Runtime,
- with `--peft` (pip install peft accelerate; checked with peft 0.21.2), `convert --to peft` loads in PEFT and computes the same.

Needs tools/requirements-torch.txt. Exit code 0 if all agree.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import transformers as tf
from transformers.pytorch_utils import Conv1D

from tools.lib import options
from tools.lib.compiler import Compiler, read_tensors, write_tensors
from tools.lib.models import LLAMA_TINY, NO_DROPOUT, TINY
from tools.lib.onnx_runtime import run_session, session_of
from tools.lib.tolerance import HALF_PRECISION_FACTOR, Worst, compare, largest, measured, pick

RANK, ALPHA = 4, 6.0
BATCH, SEQ = 2, 7
INPUTS = 12
"""In bfloat16, errors of one input are too few to compare."""


class Adapted(torch.nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, base: torch.nn.Module, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        rows, columns = base.weight.shape
        ins, outs = (rows, columns) if isinstance(base, Conv1D) else (columns, rows)
        self.lora_A = torch.nn.Parameter(0.3 * torch.randn(RANK, ins))
        self.lora_B = torch.nn.Parameter(0.3 * torch.randn(outs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = (x.to(self.lora_A.dtype) @ self.lora_A.T) @ self.lora_B.T * self.scale
        return (self.base(x) + delta).to(x.dtype)


class Mlp(torch.nn.Module):
    """Linear layers with and without bias, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 40)
        self.shared = torch.nn.Linear(40, 40, bias=False)
        self.down = torch.nn.Linear(40, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return self.down(torch.tanh(self.shared(torch.tanh(self.shared(h)))))


class Logits(torch.nn.Module):
    """Token ids to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@dataclass
class Subject:
    build: Callable[[], torch.nn.Module]
    targets: str
    inputs: Callable[[], tuple[str, torch.Tensor]]
    exporters: tuple[str, ...]
    rslora: bool = False


def tokens() -> tuple[str, torch.Tensor]:
    return "input_ids", torch.randint(3, 347, (BATCH, SEQ))


def floats() -> tuple[str, torch.Tensor]:
    return "x", torch.randn(BATCH, SEQ, 24)


ALL = ("dynamo", "legacy", "torchscript", "pt2")
SUBJECTS = {
    "mlp": Subject(Mlp, "up,shared,down", floats, ALL),
    "gpt2": Subject(
        lambda: Logits(tf.GPT2LMHeadModel(tf.GPT2Config(use_cache=False, **NO_DROPOUT, **TINY))),
        "c_attn,c_proj,*c_fc*",
        tokens,
        ("dynamo", "pt2"),
        rslora=True,
    ),
    "llama": Subject(
        lambda: Logits(tf.LlamaForCausalLM(tf.LlamaConfig(use_cache=False, **LLAMA_TINY))),
        "q_proj,v_proj,down_proj",
        tokens,
        ("dynamo", "pt2"),
    ),
}


def export(model: torch.nn.Module, form: str, name: str, x: torch.Tensor, folder: Path) -> tuple[Path, list[str]]:
    """Writes a model in a form of export, and returns the file and options that read it."""
    if form == "pt2":
        file = folder / "model.pt2"
        torch.export.save(torch.export.export(model, (x,)), file)
        return file, []
    if form == "torchscript":
        file = folder / "model.pt"
        torch.jit.save(torch.jit.trace(model, x), file)
        dtype = "i64" if x.dtype == torch.int64 else "f32"
        return file, ["--input", f"{name}:{dtype}[{','.join(map(str, x.shape))}]", "--output-names", "out"]
    file = folder / "model.onnx"
    # The exporter folds lookups of positions where it knows the sizes.
    sizes = {"dynamic_shapes": ({0: "batch", 1: "seq"},)} if form == "dynamo" else {}
    torch.onnx.export(
        model, (x,), file, dynamo=form == "dynamo", opset_version=18, input_names=[name], output_names=["out"],
        verbose=False, **sizes,
    )  # fmt: skip
    return file, []


def adapted(model: torch.nn.Module, modules: list[str], scale: float) -> torch.nn.Module:
    """Returns a copy of a model with an adapter in each module."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in modules:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], Adapted(model.get_submodule(name), scale))
    return model


def agree(label: str, got: np.ndarray, want: np.ndarray) -> tuple[str, Worst]:
    return label, compare({"output": got}, {"output": want}, float(np.abs(want).max()))


def root_mean_square(tensors: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    errors = [(t.double() - e).flatten() for t, e in zip(tensors, exact, strict=True)]
    return float(torch.cat(errors).square().mean().sqrt())


def narrow_trial(compiler: Compiler, dtype: torch.dtype, folder: Path) -> Worst:
    """A base in bfloat16, with adapters of an element type, on several inputs."""
    torch.manual_seed(2)
    model = Mlp().to(torch.bfloat16)
    modules = ["up", "shared", "down"]
    narrow = adapted(model, modules, ALPHA / RANK).to(torch.bfloat16)
    for module in modules:
        layer = narrow.get_submodule(module)
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.data.to(dtype), layer.lora_B.data.to(dtype)
    exact = copy.deepcopy(narrow).double()

    def adapters(of: torch.nn.Module) -> list[torch.nn.Parameter]:
        return [p for m in modules for p in (of.get_submodule(m).lora_A, of.get_submodule(m).lora_B)]

    file, _ = export(model, "dynamo", "x", torch.randn(BATCH, SEQ, 24).to(torch.bfloat16), folder)
    train = folder / "train.onnx"
    words = f"r={RANK},alpha={ALPHA},dtype={'f32' if dtype == torch.float32 else 'base'},targets={','.join(modules)}"
    compiler.call(file, "-o", train, "--policy", "none", "--loss", "vjp", "--lora", words)
    kinds = {torch.bfloat16: ml_dtypes.bfloat16, torch.float32: np.float32}
    names = [f"{m}.lora_{end}.weight" for m in modules for end in "AB"]
    weights = {n: p.detach().float().numpy().astype(kinds[dtype]) for n, p in zip(names, adapters(narrow), strict=True)}
    own: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    wide: list[torch.Tensor] = []
    for _ in range(INPUTS):
        x, cotangent = (torch.randn(BATCH, SEQ, 24).to(torch.bfloat16) for _ in range(2))
        for model, gradients in ((narrow, theirs), (exact, wide)):
            kind = next(model.get_submodule("up").base.parameters()).dtype
            gradients += torch.autograd.grad(model(x.to(kind)), adapters(model), cotangent.to(kind))
        feeds = {
            n: t.float().numpy().astype(ml_dtypes.bfloat16) for n, t in {"x": x, "out.cotangent": cotangent}.items()
        }
        found = compiler.run_tensors(train, feeds | weights, folder)
        own += [torch.from_numpy(found[f"{n}.grad"].astype(np.float64)) for n in names]
    allowed = HALF_PRECISION_FACTOR * root_mean_square(theirs, wide)
    return measured("gradients", root_mean_square(own, wide), allowed)


def trial(compiler: Compiler, subject: Subject, form: str, peft: bool, folder: Path) -> list[tuple[str, Worst]]:
    torch.manual_seed(1)
    model = subject.build().eval()
    for parameter in model.parameters():
        # Exporters merge equal initializers.
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    name, x = subject.inputs()
    file, reading = export(model, form, name, x, folder)
    words = f"r={RANK},alpha={ALPHA},rslora={str(subject.rslora).lower()},targets={subject.targets}"
    train = folder / "train.onnx"
    compiler.call(file, "-o", train, "--policy", "none", "--loss", "vjp", "--lora", words, *reading)
    inspected = compiler.inspect(train)
    ends = (".lora_A.weight", ".lora_B.weight")
    modules = [p["name"].removesuffix(ends[0]) for p in inspected["parameters"] if p["name"].endswith(ends[0])]
    scale = ALPHA / (RANK**0.5 if subject.rslora else RANK)
    reference = adapted(model, modules, scale)
    weights: dict[str, np.ndarray] = {}
    for module in modules:
        layer = reference.get_submodule(module)
        weights |= {module + end: p.detach().numpy() for end, p in zip(ends, (layer.lora_A, layer.lora_B), strict=True)}
    # PyTorch's.
    y = reference(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    want: dict[str, np.ndarray] = {}
    for module in modules:
        layer = reference.get_submodule(module)
        want |= {
            f"{module}{end}.grad": p.grad.numpy() for end, p in zip(ends, (layer.lora_A, layer.lora_B), strict=True)
        }
    # Ours.
    ports = {p["name"] for p in inspected["inputs"]}
    (seed,) = [p for p in ports if p.endswith(".cotangent")]
    output = seed.removesuffix(".cotangent")
    read_as = next(p for p in ports if p != seed)
    found = compiler.run_tensors(train, {read_as: x.numpy(), seed: cotangent.numpy(), **weights}, folder)
    gradients = {n: t for n, t in found.items() if n.endswith(".grad")}
    plain = y.detach().numpy()
    rows = [("gradients", compare(gradients, want, largest(want))), agree("output", found[output], plain)]
    # Merged.
    trained = folder / "trained.safetensors"
    write_tensors(trained, weights)
    whole = folder / "whole.safetensors"
    compiler.call("convert", file, trained, "--lora", words, "--to", "safetensors", "-o", whole, *reading)
    merged = copy.deepcopy(model)
    merged.load_state_dict({n: torch.from_numpy(t.copy()) for n, t in read_tensors(whole).items()}, strict=True)
    rows.append(agree("merged in PyTorch", merged(x).detach().numpy(), plain))
    before, after = model.state_dict(), merged.state_dict()
    touched = {f"{module}.weight" for module in modules}
    for key, tensor in before.items():
        if key not in touched and not torch.equal(tensor, after[key]):
            rows.append((key, Worst(problem=f"{key} changed")))
    inference = folder / "merged.onnx"
    compiler.call("convert", file, trained, "--lora", words, "--to", "onnx", "-o", inference, *reading)
    session = session_of(inference)
    (one,) = run_session(session, {session.get_inputs()[0].name: x.numpy()}).values()
    rows.append(agree("merged in ONNX Runtime", one, plain))
    if peft:
        import peft as package

        adapter = folder / "adapter"
        compiler.call("convert", file, trained, "--lora", words, "--to", "peft", "-o", adapter, *reading)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = package.PeftModel.from_pretrained(copy.deepcopy(model), adapter).eval()
        rows.append(agree("PEFT", loaded(x).detach().numpy(), plain))
        assert json.loads((adapter / "adapter_config.json").read_text())["r"] == RANK
        # And back.
        loaded.save_pretrained(folder / "saved")
        again = folder / "again.onnx"
        compiler.call("convert", file, folder / "saved", "--to", "onnx", "-o", again, *reading)
        if again.read_bytes() != inference.read_bytes():
            rows.append(("PEFT", Worst(problem="the model with PEFT's own file differs")))
    return rows


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--peft", action="store_true", help="also load adapters with PEFT")
    arguments = parser.parse_args()
    compiler = Compiler(arguments.ckpt_opt)
    failed = 0
    for name, subject in SUBJECTS.items():
        for form in subject.exporters:
            with tempfile.TemporaryDirectory() as folder:
                rows = trial(compiler, subject, form, arguments.peft, Path(folder))
            bad = [(label, worst) for label, worst in rows if not worst.agrees or worst.ratio > 1.0]
            failed += bool(bad)
            top = pick([worst for _, worst in rows])
            print(f"{'fail' if bad else 'pass'}  {name:6} {form:12} {len(rows)} comparisons, worst {top}")
            for label, worst in bad:
                print(f"      {label}: {worst}")
    for dtype in (torch.bfloat16, torch.float32):
        with tempfile.TemporaryDirectory() as folder:
            worst = narrow_trial(compiler, dtype, Path(folder))
        failed += not worst.agrees or worst.ratio > 1.0
        print(f"{'pass' if worst.ratio <= 1.0 else 'fail'}  mlp in bfloat16, adapters in {dtype}: {worst}")
    return 1 if failed else 0
