"""Compares every PyTorch op that a transformer may hold with eager PyTorch, and writes docs/aten.md.

    python tools aten --ckpt-opt BINARY [--only NAME,…] [--kind pt2,core,ts] [--page docs/aten.md]

The list below covers `torch.nn`, `torch.nn.functional` and core ATen as models use them: a name, a function, and the
shapes of its inputs. Each entry becomes a module whose float inputs are also multiplied by parameters. The module is
exported with `torch.export`, as it is and decomposed to core ATen, and traced with `torch.jit.trace`. It is compiled with
`--loss vjp` and run in our runtime. tolerance.py compares outputs and gradients with PyTorch's. A row ends as

    pass     outputs and gradients agree
    refused  the frontend names the op and what to do; REFUSED lists it with the reason
    fail     anything else

Several ops share one program (`--batch`), because starting processes costs more than running them. A program that fails
is halved until the op is found. Needs tools/requirements-torch.txt. Exit code 0 if no row fails.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.lib import options, tolerance
from tools.lib.compiler import Compiler, Refused
from tools.lib.feeds import SEED


@dataclass
class Form:
    """One use of an op. Inputs are shapes (float32) or values; `module` holds further parameters."""

    name: str
    call: Callable[..., object]
    inputs: list[object]
    module: nn.Module | None = None
    train: bool = False


FORMS: list[Form] = []
ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
MHA = nn.MultiheadAttention(6, 2, batch_first=True)
KINDS = ("pt2", "core", "ts")


def form(name: str, call: Callable[..., object], *inputs: object, train: bool = False) -> None:
    module = call if isinstance(call, nn.Module) else None
    FORMS.append(Form(name, call, list(inputs), module, train))


def ints(*shape: int, below: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(7))


def truths(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) > 0.4


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(11)) + 0.3


def pairs(x: Tensor) -> Tensor:
    """Reads the elements as complex numbers, in pairs."""
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


class Turn(nn.Module):
    """Rotary embedding with a complex buffer, as some models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(5, 3), torch.arange(15.0).view(5, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(pairs(x) * self.turns).flatten(2)


class FusedLayer(nn.Module):
    """The single op that tracing an encoder layer without gradients records."""

    def __init__(self, activation: str, norm_first: bool, masks: str) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            6, 2, 8, batch_first=True, dropout=0.0, activation=activation, norm_first=norm_first
        )
        queries = torch.ones(5, 5).triu(1)
        keys = torch.tensor([[0.0] * 5, [0.0, 0.0, 0.0, 1.0, 1.0]])
        both = (queries + keys[:, None, None]).bool().repeat(1, 2, 1, 1)
        mask, self.kind = {"": (None, None), "queries": (queries, 0), "keys": (keys.bool(), 1), "both": (both, 2)}[
            masks
        ]
        self.register_buffer("mask", mask)
        self.gelu, self.first = activation == "gelu", norm_first

    def forward(self, x: Tensor) -> Tensor:
        a, n, m = self.layer.self_attn, self.layer.norm1, self.layer.norm2
        one, two = self.layer.linear1, self.layer.linear2
        op = FUSED if torch.jit.is_tracing() or torch.compiler.is_exporting() else self.plain
        return op(
            x, 6, 2, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias, self.gelu, self.first, 1e-5,
            n.weight, n.bias, m.weight, m.bias, one.weight, one.bias, two.weight, two.bias, self.mask, self.kind,
        )  # fmt: skip

    def plain(self, x: Tensor, *_: object) -> Tensor:
        """Computes the layer itself, because the fused op has no gradient."""
        hidden = torch.zeros(2, 2, 5, 5)
        if self.mask is not None:
            wide = self.mask[:, None, None] if self.kind == 1 else self.mask
            hidden = torch.zeros(2, 2, 5, 5).masked_fill(wide != 0, -torch.inf)
        return self.layer(x, src_mask=hidden.reshape(4, 5, 5))


FUSED = torch._transformer_encoder_layer_fwd
X, V = (2, 5, 6), (6,)
IMAGE = (2, 3, 8, 10)

# Elementwise.
for op in ["abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "floor", "frac", "neg", "positive", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "reciprocal", "log", "log2", "log10", "log1p", "sinc", "deg2rad", "rad2deg", "nan_to_num", "isnan", "isinf", "isfinite", "isneginf", "isposinf", "signbit", "sgn", "erfinv", "lgamma", "digamma", "logit", "asinh", "acosh", "atanh", "i0"]:  # fmt: skip
    at = 1.1 if op == "acosh" else 0.05
    top = 0.85 if op in ("acos", "asin", "erfinv", "logit", "atanh") else 3.0
    form(
        op,
        lambda x, op=op, at=at, top=top: getattr(torch, op)(
            x.sigmoid() * top + at if op == "acosh" else x.sigmoid() * min(top, 1.5) * 0.6 + at
        ),
        X,
    )
for op in [
    "add",
    "sub",
    "mul",
    "true_divide",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "hypot",
    "logaddexp",
    "logaddexp2",
    "copysign",
    "rsub",
]:
    form(op, lambda x, y, op=op: getattr(torch, op)(x, y), X, V)
# fmt: off
form("pow tensor", lambda x, y: x.sigmoid() ** y, X, V)
form("pow scalar", lambda x: x**3 + x.sigmoid() ** 0.5 + 2.0**x, X)
form("float_power", lambda x: torch.float_power(x.sigmoid(), 2.5).float(), X)
form("fmod", lambda x: torch.fmod(x, 0.7), X)
form("remainder", lambda x: torch.remainder(x, 0.7), X)
form("floor_divide", lambda x: torch.floor_divide(x.detach(), 0.7) * x, X)
form("div rounding", lambda x: torch.div(x, 0.7, rounding_mode="floor") * x + torch.div(x, 0.3, rounding_mode="trunc"), X)
form("xlogy", lambda x: torch.xlogy(x.sigmoid(), x.sigmoid() + 1), X)
form("heaviside", lambda x: torch.heaviside(x.detach(), torch.tensor(0.5)) * x, X)
form("clamp", lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) + x.clamp(max=0.3) + x.clip(-1, 1), X)
form("clamp tensor", lambda x, y: torch.clamp(x, y - 1, y + 1), X, V)
form("lerp", lambda x, y: torch.lerp(x, y, 0.3), X, X)
form("addcmul", lambda x, y: torch.addcmul(x, y, y, value=0.3), X, V)
form("addcdiv", lambda x, y: torch.addcdiv(x, y, y.exp(), value=0.3), X, V)
form("where", lambda x, y: torch.where(x > 0, x, y) + torch.where(x > 0, 1.0, y) + torch.where(x > y, x, 0.0), X, V)
form("where index", lambda x: x[torch.where(torch.tensor([True, False, True, True, False, True]))[0].clamp(max=1)], X)
form("comparisons", lambda x, y: x * ((x > y) | (x < 0.1) & ~(x >= y) ^ (x <= 0) | (x == y) | (x != 1)).float(), X, V)
form("logical", lambda x: x * (torch.logical_and(x > 0, x < 1) | torch.logical_or(x > 2, x < -1) | torch.logical_xor(x > 0, x > 1) | torch.logical_not(x > 0)), X)
form("isclose", lambda x: x * torch.isclose(x, x + 1e-9), X)
form("bitwise", lambda i, x: x * ((i & 3) | (i ^ 5) | ~i | (i << 2) | (i >> 1)).float(), ints(2, 5, 6, below=100), X)

# Activations.
for op in ["relu", "relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "tanhshrink", "hardtanh", "hardsigmoid", "hardswish", "leaky_relu", "logsigmoid", "softshrink", "hardshrink", "sigmoid", "tanh"]:  # fmt: skip
    form(f"F.{op}", lambda x, op=op: getattr(F, op)(x), X)
form("F.gelu tanh", lambda x: F.gelu(x, approximate="tanh"), X)
form("F.threshold", lambda x: F.threshold(x, 0.1, 0.5), X)
form("F.glu", lambda x: F.glu(x) + F.glu(x, 2), X)
form("F.softmax", lambda x: F.softmax(x, -1) + F.softmax(x, 1) + F.softmin(x, 0), X)
form("F.log_softmax", lambda x: F.log_softmax(x, -1), X)
form("F.rrelu", lambda x: F.rrelu(x), X)
form("nn.PReLU", nn.PReLU(5), X)
form("F.gumbel_softmax", lambda x: F.gumbel_softmax(x) * 0 + x, X)
form("softmax dtype", lambda x: torch.softmax(x, -1, dtype=torch.float64).float(), X)

# Reductions.
for op in ["sum", "mean", "prod", "amax", "amin", "logsumexp", "std", "var"]:
    form(op, lambda x, op=op: getattr(torch, op)(x, 1) + getattr(torch, op)(x, 1, keepdim=True).sum(1), X)
form("sum all", lambda x: x.sum() + x.mean() + x.max() + x.min() + x.prod() + x.std() + x.var() + x.norm() + x.median(), X)
form("max dim", lambda x: x.max(-1).values + x.min(-1)[0] + x.max(-1).indices, X)
form("argmax", lambda x: x.sum(-1) + x.argmax(-1) + x.argmin(-1), X)
form("var_mean", lambda x: sum(torch.var_mean(x, -1)) + sum(torch.std_mean(x, -1)), X)
form("var correction", lambda x: torch.var(x, -1, correction=0) + torch.var(x, dim=[0, 2], unbiased=False)[None], X)
form("norm", lambda x: torch.linalg.vector_norm(x, dim=-1) + torch.norm(x, p=1, dim=-1) + x.norm(dim=-1) + torch.norm(x, p=float("inf"), dim=-1), X)
form("norm p3", lambda x: torch.linalg.vector_norm(x, 3, dim=-1), X)
form("any all", lambda x: x * (x > 2).any(-1, keepdim=True) + x * (x < 9).all() + x.sum() * (x > 9).any(), X)
form("cumsum", lambda x: x.cumsum(1), X)
form("cumprod", lambda x: x.sigmoid().cumprod(1), X)
form("logcumsumexp", lambda x: x.logcumsumexp(1), X)
form("cummax", lambda x: x.cummax(1).values + x.cummin(2).values * x.cummax(0).indices, X)
form("linalg_norm", lambda x: torch.linalg.norm(x) + torch.linalg.norm(x, 1, (1, 2)) + torch.linalg.norm(x[0], -torch.inf) + torch.linalg.matrix_norm(x), X)
form("topk", lambda x: x.topk(3, -1).values.sum(-1) + x.topk(2, -1, largest=False)[0].sum(-1), X)
form("sort", lambda x: x.sort(-1).values * torch.arange(6) + x.argsort(-1, descending=True), X)
form("kthvalue", lambda x: x.kthvalue(2, -1).values, X)
form("median", lambda x: x.median(-1).values, X)
form("mode", lambda x: x + x.round().mode(-1).values[..., None], X)
form("nansum", lambda x: x.nansum(-1) + x.nanmean(-1), X)
form("count_nonzero", lambda x: x * (x > 0).count_nonzero(), X)
form("aminmax", lambda x: x + sum(x.long().aminmax(dim=-1, keepdim=True)), X)
form("quantile", lambda x: x.quantile(0.3, dim=-1), X)
form("F.normalize", lambda x: F.normalize(x, dim=-1), X)
form("F.cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), X, V)
form("F.pairwise_distance", lambda x, y: F.pairwise_distance(x, y), X, V)
form("cdist", lambda x: torch.cdist(x, x * 2 + 1), X)
form("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), X)
form("histc", lambda x: x * torch.histc(x.detach(), bins=4, min=-1, max=1).sum(), X)
form("bincount", lambda x, i: x * torch.bincount(i, minlength=5)[:1], X, ints(7, below=5))
form("dist", lambda x, y: torch.dist(x, y), X, X)

# Views and shapes.
form("views", lambda x: x.reshape(10, 6).t() @ x.view(-1, 6) + x.permute(2, 0, 1).transpose(0, 1).flatten(1).T.sum() + x.movedim(0, -1).sum(), X)
form("squeeze", lambda x: x[:, None].squeeze(1).unsqueeze(0).squeeze(), X)
form("expand", lambda x, y: y.expand(2, 5, 6) * x + y.expand_as(x) + torch.broadcast_to(y, (2, 5, 6)), X, V)
form("broadcast_tensors", lambda x, y: sum(torch.broadcast_tensors(x, y)), X, V)
form("atleast", lambda y: torch.atleast_2d(y) + torch.atleast_3d(y).sum(), V)
form("split", lambda x: torch.split(x, [1, 5], -1)[1].sum(-1) + x.split(2, 1)[2].sum(-1) + x.chunk(3, -1)[1].sum(-1), X)
form("tensor_split", lambda x: x.tensor_split(4, -1)[0].sum(-1) + x.tensor_split([1, 3], -1)[1].sum(-1), X)
form("hsplit", lambda x: torch.hsplit(x, 5)[2] + torch.dsplit(x, 2)[1].sum(), X)
form("unbind", lambda x: x.unbind(1)[2] + x.select(1, 0) + x.narrow(1, 2, 1)[:, 0], X)
form("unflatten", lambda x: x.unflatten(-1, (2, -1)).sum(-1), X)
form("unfold", lambda x: x.unfold(1, 3, 2), X)
form("as_strided", lambda x: torch.as_strided(x.contiguous(), (3, 4), (6, 1), 2), X)
form("as_strided windows", lambda x: x.transpose(0, 1).as_strided((2, 2, 3, 6), (30, 12, 6, 1)), X)
form("views in place", lambda x: (x * 2).unsqueeze_(1).transpose_(0, 2).squeeze_(1), X)
form("diagonal", lambda x: x.diagonal(dim1=1, dim2=2) + x.diagonal(1, 1, 2).sum(), X)
form("diag", lambda x, y: torch.diag(y) * 2 + torch.diag(x[0, :5, :5]).sum(), X, V)
form("diag_embed", lambda x: torch.diag_embed(x), X)
form("trace", lambda x: x[0].trace() + x, X)
form("rot90", lambda x: torch.rot90(x, 1, [1, 2]), X)
form("flip roll", lambda x: x.flip(1, 2) + x.roll(2, 1) + x.roll((1, -2), (0, 2)) + x.roll(3) + x.fliplr() + x.flipud(), X)
form("slices", lambda x: x[:, 1:-1:2, ...].sum(1) + x[..., -1, :] + x[:, ::3].sum(1), X)
form("swapaxes", lambda x: x.swapaxes(0, 1).swapdims(1, 2).adjoint().mT, X)
form("contiguous", lambda x: x.transpose(1, 2).contiguous().clone() * x.mT, X)
form("detach", lambda x: x.detach() * x, X)
form("view_as", lambda x, y: x.view_as(y) * y + x.reshape_as(y) + x.type_as(y), X, X)
form("view dtype", lambda x: x * x.detach().view(torch.int32).bitwise_and(1).float(), X)
form("meshgrid", lambda x, y: sum(torch.meshgrid(y, x[0, 0], indexing="ij")), X, V)
form("meshgrid xy", lambda x, y: sum(torch.meshgrid(y, x[0, :, 0], indexing="xy")), X, V)
form("cartesian_prod", lambda y: torch.cartesian_prod(y, y * 2), V)
form("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 4))
form("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (2, 3, 8, 4))
form("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (2, 4, 3, 4))

# Put together.
form("cat stack", lambda x: torch.cat([x, x * 2], -1).sum(-1) + torch.stack([x, x], 1).sum((1, 3)), X)
form("hstack", lambda x: torch.hstack([x, x]).sum(1) + torch.vstack([x, x]).sum((0, 1)) + torch.dstack([x, x]).sum(), X)
form("column_stack", lambda x: torch.column_stack([x[0], x[1]]), X)
form("repeat tile", lambda x: x.repeat(1, 2, 1) + x.tile(2, 1), X)
form("repeat_interleave", lambda x: x.repeat_interleave(2, 1) + x.repeat_interleave(torch.tensor([1, 3, 2, 2, 2]), 1), X)
form("kron", lambda x, y: torch.kron(x, y), (2, 3), (4,))
form("block_diag", lambda x, y: torch.block_diag(x, y), (2, 3), (3, 4))
for mode in ("constant", "reflect", "replicate", "circular"):
    form(f"F.pad {mode}", lambda x, mode=mode: F.pad(x, (1, 2, 2, 1), mode=mode), IMAGE)
form("F.pad negative", lambda x: F.pad(x, (-1, 2, 1, -2), value=0.5), X)
form("F.pad reflect 1d", lambda x: F.pad(x, (2, 1), mode="reflect"), X)
form("tril triu", lambda x: x.tril() + x.triu(1) + torch.tril(x, -1), X)
form("tril_indices", lambda x: x[0][tuple(torch.tril_indices(5, 5))] + x[0][tuple(torch.triu_indices(5, 5))], X)

# Indexing.
I2 = ints(2, 4, below=5)
form("index_select", lambda x, i: x.index_select(1, i[0]), X, I2)
form("gather", lambda x, i: x.gather(1, i[..., None].expand(2, 4, 6)) + torch.take_along_dim(x, i[..., None], 1), X, I2)
form("take", lambda x, i: x.take(i), X, I2)
form("index", lambda x, i: x[torch.arange(2)[:, None], i] + x[:, i[0]] + x[0, i], X, I2)
form("index bool", lambda x, m: x * m + x.masked_fill(m, 0.5), X, truths(2, 5, 6))
form("scatter", lambda x, i: x.scatter(1, i[..., None].expand(2, 4, 6), x[:, :4] * 2), X, torch.tensor([[0, 2, 1, 4], [3, 1, 0, 2]]))
form("scatter value", lambda x, i: x.scatter(1, i[..., None], 2.5), X, I2)
form("scatter_add", lambda x, i: x.scatter_add(1, i[..., None].expand(2, 4, 6), x[:, :4] * 2), X, I2)
for reduce in ("sum", "mean", "amax", "amin", "prod"):
    form(f"scatter_reduce {reduce}", lambda x, i, r=reduce: x.scatter_reduce(1, i[..., None].expand(2, 4, 6), x[:, :4] * 2, r), X, I2)
form("index_add", lambda x, i: x.index_add(1, i[0], x[:, :4] * 2, alpha=0.5), X, I2)
form("index_copy", lambda x, i: x.index_copy(1, i, x[:, :3] * 2), X, torch.tensor([3, 0, 2]))
form("index_fill", lambda x, i: x.index_fill(1, i, 0.5), X, torch.tensor([3, 0, 2]))
form("index_put", lambda x, i: x.index_put((torch.tensor([0, 1]), torch.tensor([2, 3])), x[:, 0] * 2) + x.index_put((i,), x[0, 0], accumulate=True), X, ints(2, 4, below=2))
form("index_reduce", lambda x, i: x.index_reduce(1, i[0], x[:, :4] * 2, "amax"), X, I2)
form("masked_scatter", lambda x, m: x.masked_scatter(m, x * 2), X, truths(2, 5, 6))
form("masked_select", lambda x, m: x.masked_select(m).sum(), X, truths(2, 5, 6))
form("nonzero", lambda x, m: x.sum() * m.nonzero().float().sum(), X, truths(2, 5))
form("select_scatter", lambda x, y: x.select_scatter(y.expand(2, 6), 1, 2) + x.slice_scatter(x[:, :2] * 3, 1, 1, 3), X, V)
form("diagonal_scatter", lambda x, y: x.diagonal_scatter(y[:5].expand(2, 5), 0, 1, 2), X, V)
form("put", lambda x, i: x.put(i, x.flatten()[:8].view(2, 4), accumulate=True), X, I2)
form("bucketize", lambda x: x * torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 0.5])), X)
form("searchsorted", lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0.0, 0.5]), x.detach(), right=True), X)
form("F.one_hot", lambda x, i: F.one_hot(i, 5).float() @ x, X, I2)
form("F.embedding", lambda w, i: F.embedding(i, w, padding_idx=1), (5, 6), I2)
form("nn.Embedding", nn.Embedding(5, 6, padding_idx=0, max_norm=None), I2)
form("F.embedding_bag", lambda w, i: F.embedding_bag(i, w, mode="mean"), (5, 6), I2)
form("F.embedding_bag sum", lambda w, i: F.embedding_bag(i, w, mode="sum"), (5, 6), I2)
form("unique", lambda x, i: x.sum() * torch.unique(i).float().sum(), X, I2)
form("isin", lambda x, i: x[:, :4] * torch.isin(i, torch.tensor([1, 3]))[..., None], X, I2)
form("argwhere", lambda x, m: x.sum() * torch.argwhere(m).float().sum(), X, truths(2, 5))

# Products.
form("matmul", lambda x, y: x @ x.mT + (x @ y)[..., None] + (y @ y), X, V)
form("bmm", lambda x: torch.bmm(x, x.mT) + torch.baddbmm(torch.ones(5), x, x.mT, beta=0.5, alpha=2), X)
form("addmm", lambda x, y: torch.addmm(y, x[0], torch.eye(6), beta=0.5, alpha=2) + torch.mm(x[0], torch.eye(6)), X, V)
form("addmv", lambda x, y: torch.addmv(x[0, :, 0], x[0], y) + torch.mv(x[0], y), X, V)
form("addr", lambda x, y: torch.addr(x[0], x[0, :, 0], y) + torch.outer(x[0, :, 0], y), X, V)
form("dot", lambda y: torch.dot(y, y) + torch.inner(y, y * 2) + torch.vdot(y, y), V)
form("tensordot", lambda x: torch.tensordot(x, x, dims=([0, 2], [0, 2])), X)
for text in ("bij,bkj->bik", "bij,bij->b", "bij,j->ji", "bii->bi", "bij->jb", "...j,...j->...", "b i j, b k j -> b k i", "bij,bkj"):
    form(f"einsum {text}", lambda x, text=text: torch.einsum(text, *({1: [x[:, :, :5]], 2: [x, x[0, 0]]}[2 if text == "bij,j->ji" else 1] if text in ("bij,j->ji", "bii->bi", "bij->jb") else [x, x * 2])), X)
form("einsum three", lambda x: torch.einsum("bij,bkj,bkl->bil", x, x, x), X)
form("einsum xor", lambda x: torch.einsum("bqhd,bkhd->bhqk", x.view(2, 5, 2, 3), x.view(2, 5, 2, 3)), X)
form("chain_matmul", lambda x: torch.linalg.multi_dot([x[0], x[1].T, x[0]]), X)
form("bilinear", lambda x, w: F.bilinear(x, x, w), X, (4, 6, 6))
form("F.linear", lambda x, w: F.linear(x, w) + F.linear(x, w, w[:, 0]), X, (4, 6))
form("grouped_mm", lambda x, w: torch._grouped_mm(x, w, offs=ENDS) + torch._grouped_mm(x, w.mT, offs=ENDS) + torch._grouped_mm(x.mT, x, offs=ENDS)[:, :4].sum(0), (4, 8), (3, 8, 8))
form("matrix_power", lambda x: torch.linalg.matrix_power(x[:, :5, :5], 3), X)
form("cross", lambda x: torch.cross(x[..., :3], x[..., 3:], dim=-1) + torch.linalg.cross(x[..., :3], x[..., 3:]), X)

# Convolution, pooling, resampling.
form("conv1d", nn.Conv1d(5, 4, 3, stride=2, padding=1), X)
form("conv1d same", nn.Conv1d(5, 4, 3, padding="same"), X)
form("conv1d valid", nn.Conv1d(5, 4, 3, padding="valid", bias=False), X)
form("conv2d", nn.Conv2d(3, 6, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=3), IMAGE)
form("conv3d", nn.Conv3d(2, 3, 2), (1, 2, 3, 4, 5))
form("conv reflect", nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), IMAGE)
form("conv_transpose1d", nn.ConvTranspose1d(5, 4, 3, stride=2, padding=1, output_padding=1), X)
form("conv_transpose2d", nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, groups=3), IMAGE)
form("max_pool1d", lambda x: F.max_pool1d(x, 2), X)
form("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1) + F.max_pool2d(x, (3, 3), stride=2, padding=1, dilation=1), IMAGE)
form("max_pool2d ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), IMAGE)
form("max_pool3d", lambda x: F.max_pool3d(x, 2), (1, 2, 4, 4, 6))
form("max_pool indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], IMAGE)
form("avg_pool1d", lambda x: F.avg_pool1d(x, 2, 1), X)
form("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE)
form("avg_pool2d ceil", lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), IMAGE)
form("avg_pool2d divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), IMAGE)
form("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (1, 2, 4, 4, 6))
form("adaptive_avg 1", lambda x: F.adaptive_avg_pool2d(x, 1) + F.adaptive_avg_pool2d(x, (1, 1)), IMAGE)
form("adaptive_avg even", lambda x: F.adaptive_avg_pool2d(x, (4, 5)) + F.adaptive_avg_pool2d(x, (None, 5))[:, :, :4], IMAGE)
form("adaptive_avg uneven", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), IMAGE)
form("adaptive_avg 1d", lambda x: F.adaptive_avg_pool1d(x, 3), X)
form("adaptive_max", lambda x: F.adaptive_max_pool2d(x, (4, 5)), IMAGE)
form("adaptive_max 1d", lambda x: F.adaptive_max_pool1d(x, 1), X)
form("lp_pool", lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2), IMAGE)
form("interpolate nearest", lambda x: F.interpolate(x, scale_factor=2), IMAGE)
form("interpolate nearest size", lambda x: F.interpolate(x, size=(5, 7)), IMAGE)
form("interpolate nearest-exact", lambda x: F.interpolate(x, size=(5, 7), mode="nearest-exact"), IMAGE)
form("interpolate bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE)
form("interpolate corners", lambda x: F.interpolate(x, size=(5, 17), mode="bilinear", align_corners=True), IMAGE)
form("interpolate bicubic", lambda x: F.interpolate(x, size=(12, 15), mode="bicubic"), IMAGE)
form("interpolate bicubic corners", lambda x: F.interpolate(x, size=(12, 15), mode="bicubic", align_corners=True), IMAGE)
form("interpolate linear", lambda x: F.interpolate(x, size=9, mode="linear"), X)
form("interpolate antialias", lambda x: F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True), IMAGE)
form("interpolate area", lambda x: F.interpolate(x, size=(4, 5), mode="area"), IMAGE)
form("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), IMAGE, (2, 4, 5, 2))
form("grid_sample border", lambda x, g: F.grid_sample(x, g, padding_mode="border", align_corners=True), IMAGE, (2, 4, 5, 2))
form("grid_sample reflection", lambda x, g: F.grid_sample(x, g * 2, padding_mode="reflection", align_corners=False), IMAGE, (2, 4, 5, 2))
form("grid_sample nearest", lambda x, g: F.grid_sample(x, g, "nearest", align_corners=False), IMAGE, (2, 4, 5, 2))
form("grid_sample volumes", lambda x, g: F.grid_sample(x.unflatten(1, (1, 3)), g.tanh(), align_corners=True), IMAGE, (2, 2, 4, 5, 3))
form("interpolate scales", lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"), IMAGE)
form("F.unfold", lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGE)
form("F.fold", lambda x: F.fold(x, (4, 5), 2), (2, 12, 12))

# Norms.
form("nn.LayerNorm", nn.LayerNorm(6), X)
form("nn.LayerNorm plain", nn.LayerNorm((5, 6), elementwise_affine=False), X)
form("nn.LayerNorm no bias", nn.LayerNorm(6, bias=False), X)
form("nn.RMSNorm", nn.RMSNorm(6), X)
form("nn.RMSNorm eps", nn.RMSNorm((5, 6), eps=1e-3), X)
form("nn.GroupNorm", nn.GroupNorm(2, 6), (2, 6, 4, 3))
form("nn.GroupNorm plain", nn.GroupNorm(3, 6, affine=False), (2, 6, 4))
form("nn.InstanceNorm2d", nn.InstanceNorm2d(3, affine=True), IMAGE)
form("nn.InstanceNorm1d", nn.InstanceNorm1d(5), X)
form("nn.BatchNorm2d eval", nn.BatchNorm2d(3), IMAGE)
form("nn.BatchNorm1d train", nn.BatchNorm1d(5), X, train=True)
form("nn.BatchNorm no stats", nn.BatchNorm2d(3, track_running_stats=False), IMAGE)
form("F.local_response_norm", lambda x: F.local_response_norm(x, 3), IMAGE)
form("weight_norm", nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), X)
form("spectral_norm", nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), X)

# Attention and layers.
QKV = (2, 4, 5, 6)
form("sdpa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), QKV, QKV, QKV)
form("sdpa causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), QKV, QKV, QKV)
form("sdpa gqa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), QKV, (2, 2, 7, 6), (2, 2, 7, 6))
form("sdpa bool mask", lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), QKV, (2, 4, 7, 6), truths(2, 1, 5, 7))
form("sdpa float mask", lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), QKV, (2, 4, 7, 6), (5, 7))
form("sdpa rank 3", lambda q: F.scaled_dot_product_attention(q, q, q), X)
form("mha", nn.MultiheadAttention(6, 2, batch_first=True), X, X, X)
form("mha masks", lambda x, m: MHA(x, x, x, attn_mask=torch.ones(5, 5).triu(1).bool(), key_padding_mask=m)[0], X, torch.tensor([[False] * 5, [False, False, False, True, True]]))
form("encoder layer", nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0), X)
form("encoder layer gelu first", nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0, activation="gelu", norm_first=True), X)
for first, act in ((False, "relu"), (True, "gelu")):
    for masks in ("", "queries", "keys", "both"):
        form(f"fused encoder layer {act} {masks}", FusedLayer(act, first, masks), X)
form("decoder layer", nn.TransformerDecoderLayer(6, 2, 8, batch_first=True, dropout=0.0), X, X)
form("nn.Transformer", nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True), X, X)
form("nn.LSTM", nn.LSTM(6, 4, batch_first=True), X)
form("nn.GRU", nn.GRU(6, 4, batch_first=True), X)
form("nn.RNN", nn.RNN(6, 4, batch_first=True), X)
form("nn.LSTM two ways", nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True), X)
form("nn.LSTMCell", nn.LSTMCell(6, 4), (2, 6))
form("nn.GRUCell", nn.GRUCell(6, 4), (2, 6))
form("F.dropout eval", lambda x: F.dropout(x, 0.5, False) + F.alpha_dropout(x, 0.5, False) + F.dropout2d(x, 0.5, False), X)
form("nn.Bilinear", nn.Bilinear(6, 6, 3), X, X)
form("nn.Flatten", nn.Sequential(nn.Flatten(), nn.Unflatten(1, (3, 10)), nn.Identity()), X)

# Losses.
SCORES, CLASSES = (7, 5), ints(7, below=5)
IGNORED = torch.tensor([0, 1, -100, 3, 4, -100, 2])
for reduction in ("mean", "sum", "none"):
    form(f"cross_entropy {reduction}", lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r), SCORES, IGNORED)
    form(f"cross_entropy smooth {reduction}", lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r, label_smoothing=0.1), SCORES, IGNORED)
    form(f"cross_entropy weight smooth {reduction}", lambda x, t, r=reduction: F.cross_entropy(x, t, weight=torch.tensor([1.0, 2.0, 0.5, 1.5, 0.1]), reduction=r, label_smoothing=0.1), SCORES, IGNORED)
    form(f"cross_entropy probabilities {reduction}", lambda x, y, r=reduction: F.cross_entropy(x, y.softmax(-1), reduction=r), SCORES, SCORES)
    form(f"mse l1 {reduction}", lambda x, y, r=reduction: F.mse_loss(x, y, reduction=r) + F.l1_loss(x, y, reduction=r), X, X)
    form(f"smooth_l1 huber {reduction}", lambda x, y, r=reduction: F.smooth_l1_loss(x, y, reduction=r, beta=0.5) + F.huber_loss(x, y, reduction=r, delta=0.7), X, X)
    form(f"kl_div {reduction}", lambda x, y, r=reduction: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=r) + F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction=r, log_target=True), X, X)
    form(f"bce {reduction}", lambda x, y, r=reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r) + F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=r), X, X)
form("cross_entropy spatial", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (2, 5, 3, 4), ints(2, 3, 4, below=5))
form("cross_entropy single", lambda x, t: F.cross_entropy(x, t), (5,), torch.tensor(3))
form("cross_entropy weight", lambda x, t: F.cross_entropy(x, t, weight=torch.tensor([1.0, 2.0, 0.5, 1.5, 0.1]), ignore_index=3), SCORES, CLASSES)
form("bce weights", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), weight=torch.tensor(0.7), pos_weight=torch.tensor([1.0, 2.0, 3.0, 1.0, 0.5, 1.0])), X, X)
form("kl_div batchmean", lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), X, X)
form("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(-1), t, ignore_index=2), SCORES, CLASSES)
form("margin losses", lambda x, y: F.margin_ranking_loss(x, y, torch.ones(2, 5, 6), 0.3) + F.hinge_embedding_loss(x, torch.tensor([1.0, -1, 1, 1, -1, 1])) + F.soft_margin_loss(x, torch.ones(2, 5, 6)), X, X)
form("cosine_embedding_loss", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(7)), SCORES, SCORES)
form("triplet_margin_loss", lambda x, y: F.triplet_margin_loss(x, y, x * 0.5 + 1), SCORES, SCORES)
form("gaussian_nll_loss", lambda x, y: F.gaussian_nll_loss(x, y, x.exp()), X, X)
form("poisson_nll_loss", lambda x, y: F.poisson_nll_loss(x, y.exp()), X, X)
form("multi_margin_loss", lambda x, t: F.multi_margin_loss(x, t), SCORES, CLASSES)
form("multilabel", lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).float()), SCORES, SCORES)
form("ctc_loss", lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), (6, 6), (2, 2)), (6, 2, 5))

# What a program holds that takes gradients itself; the gradients of these are gradients of gradients.
BACK = torch.ops.aten
form("backward gelu", lambda x, y: BACK.gelu_backward(x, y) + BACK.gelu_backward(x, y, approximate="tanh"), X, X)
# PyTorch has no gradient of these two: with create_graph it writes them as other ops.
form("backward silu mish", lambda x, y: BACK.silu_backward(x.detach(), y.detach()) + BACK.mish_backward(x.detach(), y.detach()), X, X)
form("backward tanh sigmoid", lambda x, y: BACK.tanh_backward(x, y.tanh()) + BACK.sigmoid_backward(x, y.sigmoid()), X, X)
form("backward relu", lambda x, y: BACK.threshold_backward(x, y, 0) + BACK.threshold_backward(x, y, 0.3) + BACK.leaky_relu_backward(x, y, 0.1, False), X, X)
form("backward elu", lambda x, y: BACK.elu_backward(x, 0.7, 1, 1, False, y) + BACK.elu_backward(x, 0.7, 1, 1, True, F.elu(y, 0.7)), X, X)
form("backward softplus hardswish", lambda x, y: BACK.softplus_backward(x, y, 2.0, 1.5) + BACK.hardswish_backward(x, y), X, X)
form("backward softmax", lambda x, y: BACK._softmax_backward_data(x, y.softmax(1), 1, torch.float32), X, X)
form("backward log_softmax", lambda x, y: BACK._log_softmax_backward_data(x, y.log_softmax(-1), -1, torch.float32), X, X)
form("backward layer_norm", lambda x, y, w: norm_back(x, y, w, [True, True, True]), X, X, V)
form("backward layer_norm part", lambda x, y, w: norm_back(x, y, w, [True, False, False]), X, X, V)
form("backward embedding", lambda x, i: BACK.embedding_dense_backward(x, i, 9, 2, False), X, ints(2, 5, below=7))
form("backward nll_loss", lambda x, i: nll_back(x, i), (5, 6), ints(5, below=6))
form("backward mse_loss", lambda x, y, z: BACK.mse_loss_backward(x, y, z, 0) + BACK.mse_loss_backward(x.sum(), y, z, 1), X, X, X)
form("backward views", lambda x: (BACK.select_backward(x, [2, 5, 3, 6], 2, -1), BACK.slice_backward(x, [2, 5, 9], 2, 1, 7, 1)), X)


def nll_back(x: Tensor, labels: Tensor) -> Tensor:
    _, total = BACK.nll_loss_forward(x, labels, None, 1, 3)
    return BACK.nll_loss_backward(x.sum(), x, labels, None, 1, 3, total)


def norm_back(x: Tensor, y: Tensor, w: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
    result, mean, rstd = torch.native_layer_norm(y, [6], w, w, 1e-4)
    gradients = BACK.native_layer_norm_backward(x, y, [6], mean, rstd, w, w, wanted)
    return result, *[g for g, want in zip(gradients, wanted) if want]


# Made from nothing.
form("creation", lambda x: x + torch.arange(6) + torch.arange(1, 13, 2.0) + torch.linspace(0, 1, 6) + torch.logspace(0, 1, 6) + torch.full((6,), 0.3) + torch.eye(5, 6), X)
form("like", lambda x: x + torch.ones_like(x) + torch.zeros_like(x) + torch.full_like(x, 2.0) + x.new_zeros(6) + x.new_ones(6) + x.new_full((6,), 3.0), X)
form("empty fill", lambda x: torch.empty_like(x).fill_(2.0) * x + x.new_empty(6).zero_() + torch.empty(6).fill_(1.0), X)
form("scalar_tensor", lambda x: x * torch.tensor(2.0) + torch.scalar_tensor(3.0), X)
form("casts", lambda x: x.double().float() + x.to(torch.float64).to(x) + x.long().float() + x.int().to(x.dtype) + x.bool().float(), X)
form("finfo", lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1), X)
form("complex rotary", lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 5, 3, 2)) * torch.polar(torch.ones(3), torch.arange(3.0))).flatten(2), X)
form("complex arithmetic", lambda x: torch.view_as_real(pairs(x) * pairs(x).conj() + 2 * pairs(x) - pairs(x) / (pairs(x.cos()) + 3) + x[:, :, :3] - (-pairs(x)).exp()), X)
form("complex parts", lambda x: pairs(x).abs() + pairs(x).real * pairs(x).imag + (pairs(x) + 4).angle() + torch.complex(x, x.sin())[..., :3].imag, X)
form("complex views", lambda x: torch.view_as_real(torch.cat([pairs(x).unsqueeze(1).expand(2, 4, 5, 3).transpose(1, -1)[:, 1:].flatten(1, 2).reshape(2, -1), torch.stack([pairs(x)[0, 1], pairs(x)[1, 2]]).squeeze()], -1).permute(1, 0)), X)
form("complex sums", lambda x: torch.view_as_real(pairs(x).sum(-1) + pairs(x).mean((0, 2)).unsqueeze(0) + x.to(torch.complex64).sum(2)), X)
form("complex casts", lambda x: torch.view_as_real((pairs(x).to(torch.complex128) * 2).to(torch.complex64)) + torch.is_complex(pairs(x)), X)
form("complex buffer", Turn(), X)
form("complex made", lambda x: torch.view_as_real(torch.view_as_complex(torch.cat([x[..., :1].unsqueeze(1), x[..., 1:2].unsqueeze(1)], -1)) * pairs(x).transpose(1, 2)), X)
form("complex division", lambda x: torch.view_as_real(pairs(x) * 1e-25 / (pairs(x.cos()) * 1e-25)), X)
form("complex numbers", lambda x: x * (pairs(x).sum().mean().real + torch.complex(x[0, 0, 0], x[1, 1, 1]).flatten().imag) + torch.complex(torch.tensor(2.0), x).abs(), X)
form("fft", lambda x: torch.view_as_real(torch.fft.fft(x) + torch.fft.ifft(torch.complex(x, x.cos()), dim=1)), X)
form("fft real", lambda x: torch.fft.irfft(torch.fft.rfft(x, n=10, dim=1) * torch.fft.rfft(x.tanh(), n=10, dim=1), n=10, dim=1)[:, :5] + torch.fft.irfft(torch.fft.rfft(x)), X)
form("fft odd", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=5, dim=1) + torch.fft.rfft(x, n=3, dim=1).abs().sum(), X)
form("fft axes", lambda x: torch.fft.fftn(x, dim=(1, 2)).real + torch.fft.ifft2(torch.fft.fft2(x, norm="ortho")).real, X)
form("fft norms", lambda x: torch.fft.fft(x, norm="forward").imag + torch.fft.ifft(x, norm="ortho").real + torch.fft.ifftn(x, s=(5, 6)).real, X)
form("outputs", lambda x: {"a": x * 2, "b": (x + 1, [x - 1])}, X)
form("stft window", lambda x: x * torch.hann_window(6) + torch.hamming_window(6, False), X)
form("linalg", lambda x: torch.linalg.inv(x[:, :5, :5] + 3 * torch.eye(5)), X)
form("det", lambda x: torch.linalg.det(x[:, :5, :5]), X)
form("solve_triangular", lambda x: torch.linalg.solve_triangular(x[:, :5, :5].tril() + 3 * torch.eye(5), x[:, :5, 5:], upper=False), X)
form("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT + 3 * torch.eye(5)), X)
form("dropout train shapes", lambda x: x.sigmoid().bernoulli() * 0 + x, X)
form("multinomial", lambda x: x * torch.multinomial(x.detach().softmax(-1)[0], 1).sum() * 0, X)
form("randn", lambda x: x + torch.randn_like(x) * 0 + torch.rand(5, 6) * 0 + torch.randint(2, 4, (6,)) * 0 + torch.randperm(6) * 0, X)
form("random in place", lambda x: x + torch.empty_like(x).normal_(1.0, 2.0) * 0 + torch.empty(6).uniform_(1, 2) * 0 + torch.empty_like(x).exponential_() * 0, X)
# fmt: on

RANDOM = "random numbers belong outside of the model"
DATA = "sizes that depend on data"
NO_ROW = "no such function in ONNX"
FACTORS = "factorisations belong outside of the model"
STATISTICS = "decomposed, it reads statistics that the forward pass does not keep here"
REFUSED = {
    "lgamma": NO_ROW, "digamma": NO_ROW, "i0": NO_ROW,
    "multinomial": RANDOM,
    "cumprod": "cumsum of logarithms instead",
    "mode": "no gradient", "quantile": "sort and interpolate instead", "renorm": "belongs outside of the model", "bincount": DATA, "unique": DATA, "where index": "a bound for it with --dim",
    "view dtype": "memory by bits", "index_reduce": "scatter_reduce instead",
    "diagonal_scatter": "where and eye instead", "F.embedding_bag": "embedding and a sum instead",
    "F.embedding_bag sum": "embedding and a sum instead",
    "ctc_loss": "--loss vjp instead", "linalg": FACTORS, "det": FACTORS,
    "backward layer_norm": STATISTICS, "backward layer_norm part": STATISTICS,
    "cholesky": FACTORS,
}  # fmt: skip
"""Forms that the frontends refuse, and why; in some kind of file at least each must still be refused by name."""


STATES = "PyTorch's decomposition gives the last states one axis more"
LOST = {
    ("detach", "core"): "PyTorch's decomposition turns it into alias, and gradients flow through it",
    ("nn.LSTM", "core"): STATES,
    ("nn.LSTM two ways", "core"): STATES,
}
"""What a kind of file cannot tell."""


class Program(nn.Module):
    """Several forms side by side; every float input is scaled by a parameter of its size."""

    def __init__(self, forms: list[Form]) -> None:
        super().__init__()
        self.forms = forms
        self.inner = nn.ModuleList([f.module for f in forms if f.module is not None])
        if any(f.name == "mha masks" for f in forms):
            self.inner.append(MHA)
        self.scales = nn.ParameterList()
        generator = torch.Generator().manual_seed(5)
        for f in forms:
            for given in f.inputs:
                if isinstance(given, tuple):
                    self.scales.append(nn.Parameter(torch.rand(given[-1:], generator=generator) + 0.6))
        self.train(any(f.train for f in forms))

    def forward(self, *inputs: Tensor):
        at, scale, out = 0, 0, []
        for f in self.forms:
            given = []
            for kind in f.inputs:
                x = inputs[at]
                at += 1
                if isinstance(kind, tuple):
                    x = x * self.scales[scale]
                    scale += 1
                given.append(x)
            result = f.call(*given)
            out.extend(leaves(result))
        return tuple(out)


def leaves(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in leaves(item)]
    return []


def example(forms: list[Form]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    given = []
    for f in forms:
        for kind in f.inputs:
            given.append(torch.randn(kind, generator=generator) if isinstance(kind, tuple) else kind)
    return given


@dataclass
class Truth:
    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    cotangents: list[np.ndarray] = field(default_factory=list)


def truth(program: Program, inputs: list[Tensor]) -> Truth:
    state = {k: v.clone() for k, v in program.state_dict().items()}
    outputs = program(*inputs)
    generator = torch.Generator().manual_seed(13)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    wanted = [(o, c) for o, c in zip(outputs, cotangents) if o.requires_grad]
    program.zero_grad()
    if wanted:
        torch.autograd.backward([o for o, _ in wanted], [c for _, c in wanted])
    gradients = {n: p.grad.numpy().copy() for n, p in program.named_parameters() if p.grad is not None}
    program.zero_grad()
    program.load_state_dict(state)
    return Truth([o.detach().numpy() for o in outputs], gradients, [c.numpy() for c in cotangents])


class Unexportable(Exception):
    """PyTorch itself does not export or trace it."""


def save(program: Program, inputs: list[Tensor], kind: str, path: Path) -> None:
    state = {k: v.clone() for k, v in program.state_dict().items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind != "ts":
                exported = torch.export.export(program, tuple(inputs), strict=False)
                if kind == "core":
                    exported = exported.run_decompositions()
                torch.export.save(exported, path)
            else:
                traced = torch.jit.trace(program, tuple(inputs), check_trace=False)
                torch.jit.save(traced, path)
    except Exception as error:
        raise Unexportable(
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        ) from None
    finally:
        program.load_state_dict(state)


def check(compiler: Compiler, forms: list[Form], kind: str, folder: Path) -> str:
    """Returns what is wrong, or an empty text."""
    torch.manual_seed(0)
    program = Program(forms)
    inputs = example(forms)
    want = truth(program, inputs)
    path = folder / ("p.pt" if kind == "ts" else "p.pt2")
    save(program, inputs, kind, path)
    names = [f"out{i}" for i in range(len(want.outputs))]
    told: list[str | Path] = ["--output-names", ",".join(names)]
    if kind == "ts":
        # The names of the arguments of `forward(*inputs)` are the tracer's.
        example_types = [(t.dtype, tuple(t.shape)) for t in inputs]
        words = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}
        args = traced_names(path)
        for name, (dtype, shape) in zip(args, example_types):
            told += ["--input", f"{name}:{words[dtype]}[{','.join(map(str, shape))}]"]
    else:
        args = exported_names(path)
    out = folder / "p.onnx"
    compiler.call_json(path, "-o", out, "--policy", "none", "--loss", "vjp", *told)
    feeds = {name: t.numpy() for name, t in zip(args, inputs)}
    feeds |= {f"{name}.cotangent": c for name, c in zip(names, want.cotangents)} | SEED
    found = compiler.run_tensors(out, feeds, folder, ".npz")
    outputs = dict(zip(names, want.outputs))
    verdict = compare(found, outputs)
    if verdict:
        return f"output {verdict}"
    table = compiler.call_json("inspect", path, *told)["parameters"]
    initializers = {n: p["initializer"] for p in table for n in [p["name"], *p["aliases"]]}
    turned = {n for p in table if p["transposed"] for n in [p["name"], *p["aliases"]]}
    gradients = {n: g.T if n in turned else g for n, g in want.gradients.items()}
    missing = [n for n in gradients if n not in initializers]
    if missing:
        return f"no parameter {missing[0]}"
    ours = {n: found[f"{initializers[n]}.grad"] for n in gradients if f"{initializers[n]}.grad" in found}
    verdict = compare(ours, gradients, tolerance.largest(gradients))
    return f"gradient {verdict}" if verdict else ""


def compare(got: dict, want: dict, top: float | None = None) -> str:
    """Compares as tolerance.compare does; equal infinities, and NaN at the same places, agree."""
    cleaned: tuple[dict, dict] = ({}, {})
    for name, reference in want.items():
        if name not in got:
            return f"{name}: no such result"
        if got[name].shape != reference.shape or got[name].dtype != reference.dtype:
            return (
                f"{name}: {got[name].dtype}{list(got[name].shape)}, expected {reference.dtype}{list(reference.shape)}"
            )
        finite = np.isfinite(reference)
        if not np.array_equal(got[name][~finite], reference[~finite], equal_nan=reference.dtype.kind == "f"):
            return f"{name}: other values that are not finite"
        cleaned[0][name], cleaned[1][name] = np.where(finite, got[name], 0), np.where(finite, reference, 0)
    if not want:
        return ""
    verdict = tolerance.compare(*cleaned, top)
    return "" if verdict.agrees else str(verdict)


def exported_names(path: Path) -> list[str]:
    specs = torch.export.load(path).graph_signature.user_inputs
    return list(specs)


def traced_names(path: Path) -> list[str]:
    names = [a.name for a in torch.jit.load(path).forward.schema.arguments]
    return [n for n in names if n != "self"]


def judge(compiler: Compiler, form: Form, kind: str, folder: Path) -> tuple[str, str]:
    if (form.name, kind) in LOST:
        return "-", LOST[form.name, kind]
    try:
        problem = check(compiler, [form], kind, folder)
    except Unexportable as error:
        return "-", f"PyTorch: {error}"
    except Refused as error:
        return ("refused" if form.name in REFUSED else "fail"), str(error)
    except Exception as error:
        return "fail", f"{type(error).__name__}: {error}"
    if problem:
        return "fail", problem
    return "pass", ""


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--only", type=options.words, default=[], help="comma-separated names, or beginnings of names")
    parser.add_argument(
        "--kind",
        type=options.words_of(KINDS),
        default=list(KINDS),
        help="core: decomposed to core ATen before it is saved",
    )
    options.add_counts(parser, batch=12)
    options.add_page(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.CRITICAL)
    forms = [f for f in FORMS if not args.only or any(f.name.startswith(w) for w in args.only)]
    compiler = Compiler(args.ckpt_opt)
    rows: dict[str, dict[str, tuple[str, str]]] = {f.name: {} for f in forms}
    kinds = args.kind
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in kinds:
            together = [f for f in forms if f.name not in REFUSED and (f.name, kind) not in LOST and not f.train]
            alone = [f for f in forms if f not in together]
            groups = [together[i : i + args.batch] for i in range(0, len(together), args.batch)]
            while groups:
                group = groups.pop()
                try:
                    good = not check(compiler, group, kind, folder)
                except Exception:
                    good = False
                if good:
                    rows |= {f.name: rows[f.name] | {kind: ("pass", "")} for f in group}
                elif len(group) > 2:
                    half = len(group) // 2
                    groups += [group[:half], group[half:]]
                else:
                    alone.extend(group)
            for f in alone:
                rows[f.name][kind] = judge(compiler, f, kind, folder)
                status, why = rows[f.name][kind]
                if status != "pass":
                    print(f"{status:8} {kind:4} {f.name:32} {why[:300]}", flush=True)
    for name, row in rows.items():
        # What is refused by name may be ops that are not once it is decomposed.
        if name in REFUSED and all(status == "pass" for status, _ in row.values()):
            row[kinds[-1]] = ("fail", "it is listed as refused, and passes")
            print(f"fail     {name}: {row[kinds[-1]][1]}")
    counts = counted(rows)
    print(", ".join(f"{n} {status}" for status, n in sorted(counts.items())))
    if args.page:
        args.page.write_text(page(rows, kinds))
    return 1 if counts.get("fail") or not counts.get("pass") else 0


def counted(rows: dict[str, dict[str, tuple[str, str]]]) -> Counter[str]:
    return Counter(status for row in rows.values() for status, _ in row.values())


def page(rows: dict[str, dict[str, tuple[str, str]]], kinds: list[str]) -> str:
    lines = [
        "# PyTorch's ops, op by op",
        "",
        f"Made by `python tools aten --page docs/aten.md`, PyTorch {torch.__version__}. Compares outputs and gradients with eager PyTorch, under the",
        "tolerance of `tools/lib/tolerance.py`. `pt2`: `torch.export`; `core`: the same after `run_decompositions`; `ts`: `torch.jit.trace`.",
        "`-`: PyTorch itself does not export or trace it, or loses its meaning. `refused`: the error names the op and what to do.",
        "",
        ", ".join(f"{n} {status}" for status, n in sorted(counted(rows).items())),
        "",
        "| form | " + " | ".join(kinds) + " | |",
        "|---|" + "---|" * (len(kinds) + 1),
    ]
    for name, row in rows.items():
        status = [row.get(kind, ("", ""))[0] for kind in kinds]
        lines.append(f"| `{name}` | " + " | ".join(status) + f" | {REFUSED.get(name, '')} |")
    return "\n".join(lines) + "\n"
