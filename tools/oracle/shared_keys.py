"""Checks a decoder whose upper layers all read the keys and values of one place (YOCO), in float32 and in bfloat16.

    python tools shared_keys --ckpt-opt BINARY [--exporters dynamo,file] [--draws 24]

The model follows Sun et al. 2024 (arXiv 2405.05254). Its lower layers use sliding-window attention. Their output gives one set of keys
and values, and all upper layers read it. It is exported as ONNX and as a torch.export file. Checked are, by policy and within a budget: the report says
that one layer's keys and values are read by all others; the plan changes no bit; the measured peak is the predicted one. Loss and
gradients agree with PyTorch's in float32 (tolerance.py). In bfloat16 their root mean square error against float64, over draws of
weights and tokens, is at most 1.1 times PyTorch's: cotangents of shared keys, weights that all tokens read and the loss are sums of many
16-bit terms. Exit code 0 if all holds. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.lib import options, tolerance
from tools.lib.compiler import Compiler

VOCAB, WIDTH, HEADS, WINDOW = 61, 32, 4, 4
LOWER, UPPER = 2, 3
BATCH, SEQ = 2, 11
POLICIES = ("none", "full", "selective", "budget:60%")
EXPORTERS = ("dynamo", "file")
FEWEST = 256
"""Fewer errors over all draws are not compared: their root mean square is chance."""


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class Norm(nn.Module):
    """As Llama writes it: in float32, and weighed in the element type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """Attention and a gated MLP. Where keys and values are given, it has none of its own."""

    def __init__(self, has_keys: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if has_keys else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor, mask: Tensor | None, shared: tuple[Tensor, Tensor] | None) -> Tensor:
        x = self.norms[0](h)
        k, v = shared or (heads(part) for part in self.kv(x).chunk(2, -1))
        a = F.scaled_dot_product_attention(heads(self.q(x)), k, v, attn_mask=mask, is_causal=mask is None)
        h = h + self.out(a.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](h)).chunk(2, -1)
        return h + self.down(F.silu(gate) * up)


class Yoco(nn.Module):
    def __init__(self, draw: int = 0) -> None:
        super().__init__()
        torch.manual_seed(draw)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lower = nn.ModuleList(Layer(True) for _ in range(LOWER))
        self.norm, self.kv = Norm(), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.upper = nn.ModuleList(Layer(False) for _ in range(UPPER))
        self.last, self.head = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():
            for weight in self.parameters():
                # Exporters merge equal initializers.
                weight.add_(0.05 * torch.randn_like(weight))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(input_ids)
        at = torch.arange(input_ids.shape[1])
        behind = at[:, None] - at[None, :]
        for layer in self.lower:
            h = layer(h, (behind >= 0) & (behind < WINDOW), None)
        k, v = (heads(part) for part in self.kv(self.norm(h)).chunk(2, -1))
        for layer in self.upper:
            h = layer(h, None, (k, v))
        return F.cross_entropy(self.head(self.last(h)).flatten(0, 1), labels.flatten())


def export(model: Yoco, folder: Path, exporter: str) -> Path:
    example = tuple(torch.zeros((BATCH, SEQ), dtype=torch.int64) for _ in range(2))
    sizes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("seq", min=2)}
    shapes = {"input_ids": sizes, "labels": sizes}
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.export.export(model, example, dynamic_shapes=shapes, strict=False)
        if exporter == "file":
            torch.export.save(program, folder / "model.pt2")
            return folder / "model.pt2"
        made = torch.onnx.export(program, dynamo=True, opset_version=18, output_names=["loss"], verbose=False)
        made.save(str(folder / "model.onnx"))
        return folder / "model.onnx"


def tokens(draw: int) -> dict[str, np.ndarray]:
    n = np.random.default_rng(draw)
    return {name: n.integers(0, VOCAB, (BATCH, SEQ)) for name in ("input_ids", "labels")}


def reference(model: Yoco, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss = model(*map(torch.from_numpy, feeds.values()))
    loss.backward()
    found = {f"{name}.grad": p.grad.double().numpy() for name, p in model.named_parameters()}
    return {"loss": loss.detach().double().numpy(), **found}


class Case:
    """One export, of one element type."""

    def __init__(self, compiler: Compiler, exporter: str, dtype: torch.dtype, folder: Path) -> None:
        self.compiler, self.dtype, self.folder = compiler, dtype, folder
        self.file = export(self.model(0), folder, exporter)
        inspected = compiler.inspect(self.file)
        self.names = {p["name"]: (p["initializer"], p["transposed"]) for p in inspected["parameters"]}
        self.loss = f"output:{inspected['outputs'][0]['name']}"
        self.sizes = dict(zip(inspected["inputs"][0]["shape"], (BATCH, SEQ), strict=True))

    def model(self, draw: int) -> Yoco:
        return Yoco(draw).to(self.dtype)

    def plans(self) -> list[str]:
        """Returns what is wrong with plans."""
        wrong = []
        for policy in POLICIES:
            train = self.folder / "train.onnx"
            report = self.compiler.optimize(self.file, train, policy, self.loss, self.sizes)
            readers = [len(shared["consumers"]) for shared in report["kv_sharing"]]
            if max(readers, default=0) < UPPER - 1:
                wrong.append(f"{policy}: shared keys have {readers} readers")
            self.compiler.verify(self.file, train)
            ran = self.compiler.call_json("run", train, "--seed", "1")
            if ran["measured_peak_bytes"] != ran["predicted_peak_bytes"]:
                wrong.append(
                    f"{policy}: {ran['predicted_peak_bytes']} bytes predicted, {ran['measured_peak_bytes']} measured"
                )
        return wrong

    def results(self, draw: int) -> dict[str, np.ndarray]:
        """Returns our loss and gradients with the weights of a draw, under PyTorch's names."""
        feeds = tokens(draw)
        for name, weight in self.model(draw).named_parameters():
            initializer, is_transposed = self.names[name]
            tensor = weight.detach().T if is_transposed else weight.detach()
            feeds[initializer] = as_numpy(tensor)
        found = self.compiler.run_tensors(self.folder / "whole.onnx", feeds, self.folder)
        named = {"loss": found["loss" if "loss" in found else self.loss.removeprefix("output:")].astype(np.float64)}
        for name, (initializer, is_transposed) in self.names.items():
            gradient = found[f"{initializer}.grad"].astype(np.float64)
            named[f"{name}.grad"] = gradient.T if is_transposed else gradient
        return named

    def gradients(self, draws: int) -> list[str]:
        """Returns where loss and gradients disagree with PyTorch's."""
        self.compiler.call(self.file, "-o", self.folder / "whole.onnx", "--loss", self.loss, "--policy", "none")
        if self.dtype == torch.float32:
            want = reference(self.model(0), tokens(0))
            top = tolerance.largest({n: w for n, w in want.items() if n != "loss"})
            worst = tolerance.compare(self.results(0), want, top)
            print(f"      against PyTorch: worst {worst}")
            return [] if worst.agrees else [str(worst)]
        errors: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        for draw in range(draws):
            exact, theirs = (
                reference(self.model(draw).double(), tokens(draw)),
                reference(self.model(draw), tokens(draw)),
            )
            ours = self.results(draw)
            for name, want in exact.items():
                pair = errors.setdefault(name, ([], []))
                for side, found in zip(pair, (ours, theirs), strict=True):
                    side.append((found[name] - want).ravel())
        ratios = {}
        for name, pair in errors.items():
            own, other = (np.concatenate(side) for side in pair)
            if own.size >= FEWEST:
                ratios[name] = tolerance.root_mean_square(own) / tolerance.root_mean_square(other)
        worst_name = max(ratios, key=lambda name: ratios[name])
        print(
            f"      errors over PyTorch's: median {np.median(list(ratios.values())):.2f}, {worst_name} {ratios[worst_name]:.2f}"
        )
        most = tolerance.HALF_PRECISION_FACTOR
        return [f"{name}: {ratio:.2f} times PyTorch's error" for name, ratio in ratios.items() if ratio > most]


def as_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        # Only here: all else works without this package.
        import ml_dtypes

        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--exporters", type=options.words_of(EXPORTERS), default=list(EXPORTERS))
    parser.add_argument("--draws", type=int, default=24, help="draws of weights and tokens, for bfloat16 [default: 24]")
    given = parser.parse_args()
    failed = 0
    with options.folder_or_scratch(None) as scratch:
        for exporter in given.exporters:
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{exporter}-{str(dtype).removeprefix('torch.')}"
                print(name)
                folder = scratch / name
                folder.mkdir()
                case = Case(Compiler(given.ckpt_opt), exporter, dtype, folder)
                wrong = case.plans() + case.gradients(given.draws)
                print(*(f"  fail {line}" for line in wrong), sep="\n", end="\n" if wrong else "")
                print(f"  {'fail' if wrong else 'pass'}")
                failed += bool(wrong)
    return 1 if failed else 0
