"""Exports heads and losses in the forms that people write, tiles them, and compares them with PyTorch.

    python tools loss_forms --ckpt-opt BINARY [--only NAME,…] [--exporters dynamo,legacy,file] [--draws 64]
        [--keep FOLDER]

A small model with each form of loss is exported by both of PyTorch's ONNX exporters and as a torch.export file (`.pt2`). It
is compiled with its loss whole and in chunks. It runs on tokens of which some, all or none are ignored, with a partial last
chunk, and on the shortest sequence. tolerance.py compares loss and gradients of the tiled graph with the whole one and with
PyTorch, and the tiled ONNX file in ONNX Runtime.

Forms in bfloat16 are compared tensor by tensor over --draws draws of weights and tokens. The error against float64 may not
exceed 1.1 times PyTorch's own in two norms: the root mean square of all elements of all draws, and the median over the
draws of the ratio of the largest elements. The ratio of one draw is chance (PyTorch's own error changes with the number of
threads), so the quartiles are printed beside the median. Exit code 1 if a form is not found, has another number of chunks
than asked for, or disagrees. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.lib import options, tolerance
from tools.lib.compiler import Compiler, Refused
from tools.lib.onnx_runtime import run_ort

VOCAB, WIDTH = 37, 8
CHUNKS = 3
IGNORED = -100
EXPORTERS = ("dynamo", "legacy", "file")
FEWEST = 256
"""Tensors of fewer errors, over all draws, are judged together: of so few both norms are chance."""


class Model(nn.Module):
    """Maps tokens to activations, scores and a loss."""

    def __init__(self, form: Form, draw: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3 + draw)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.add_head(form, VOCAB, WIDTH)
        with torch.no_grad():
            self.head.weight.mul_(4.0)
            self.norm.weight.add_(0.1 * torch.randn(WIDTH))
            self.norm.bias.add_(0.1 * torch.randn(WIDTH))
        if form.tied:
            self.head.weight = self.embed.weight

    def add_head(self, form: Form, vocab: int, width: int) -> None:
        self.form, self.vocab = form, vocab
        self.head = nn.Linear(width, vocab, bias=form.bias)
        self.register_buffer("class_weight", torch.linspace(0.5, 1.5, vocab))
        # Embeddings and head of a reference model.
        self.register_buffer("reference_embed", torch.randn(vocab, width))
        self.register_buffer("reference_head", torch.randn(vocab, width))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.body(self.embed(input_ids))))
        return self.form.loss(self, h, labels)


@dataclass(frozen=True)
class Form:
    loss: Callable[[Model, Tensor, Tensor], Tensor]
    bias: bool = False
    tied: bool = False
    half: bool = False
    """In bfloat16."""
    ignores: bool = True
    """Whether ignored labels mean anything to it."""
    exporters: tuple[str, ...] = EXPORTERS
    """Those that export it."""
    shortest: int = 2
    """Tokens of the shortest sequence that it can be exported for."""


def flat(s: Tensor) -> Tensor:
    return s.reshape(-1, s.shape[-1])


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def mean_ce(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h)), y.reshape(-1))


def by_nll(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(flat(m.head(h)), -1), y.reshape(-1), ignore_index=IGNORED)


def by_gather(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(m.head(h), -1)
    keep = y != IGNORED
    hit = p.gather(-1, torch.where(keep, y, 0).unsqueeze(-1)).squeeze(-1)
    return -(hit * keep).sum() / keep.sum().clamp(min=1)


def shifted_labels(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h)).float(), shifted(y).reshape(-1), ignore_index=IGNORED)


def shifted_scores(m: Model, h: Tensor, y: Tensor) -> Tensor:
    s = m.head(h)[..., :-1, :].contiguous()
    return F.cross_entropy(s.view(-1, m.vocab), y[..., 1:].contiguous().view(-1))


def shifted_hidden(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h[:, :-1])), y[:, 1:].reshape(-1))


def counted(m: Model, h: Tensor, y: Tensor) -> Tensor:
    s = flat(m.head(h).float())
    total = F.cross_entropy(s, shifted(y).reshape(-1), ignore_index=IGNORED, reduction="sum")
    return total / (shifted(y) != IGNORED).sum().clamp(min=1)


def softcap(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(torch.tanh(m.head(h) / 3.0) * 3.0).float(), y.reshape(-1))


def smoothed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h)), y.reshape(-1), label_smoothing=0.1)


def smoothed_by_hand(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = -torch.log_softmax(m.head(h), -1)
    pad = y.eq(IGNORED).unsqueeze(-1)
    hit = p.gather(-1, y.clamp(min=0).unsqueeze(-1)).masked_fill(pad, 0.0)
    every = p.sum(-1, keepdim=True, dtype=torch.float32).masked_fill(pad, 0.0)
    count = pad.numel() - pad.long().sum()
    return 0.9 * hit.sum() / count + 0.1 * every.sum() / (count * m.vocab)


def z_loss(m: Model, h: Tensor, y: Tensor) -> Tensor:
    s = flat(m.head(h))
    return F.cross_entropy(s, y.reshape(-1)) + 1e-2 * torch.logsumexp(s, -1).pow(2).mean()


def z_loss_masked(m: Model, h: Tensor, y: Tensor) -> Tensor:
    s = m.head(h)
    z = torch.logsumexp(s, -1)
    keep = (y != IGNORED).to(s.dtype)
    picked = s.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((z - picked) * keep + 1e-2 * (z * z) * keep).sum() / keep.sum().clamp(min=1)


def weighted(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h)), y.reshape(-1), weight=m.class_weight)


def summed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h)), y.reshape(-1), reduction="sum")


def each(m: Model, h: Tensor, y: Tensor) -> Tensor:
    per = F.cross_entropy(flat(m.head(h)), y.reshape(-1), reduction="none")
    return per.reshape(y.shape).sum(-1).mean()


def each_weighted(m: Model, h: Tensor, y: Tensor) -> Tensor:
    per = F.cross_entropy(flat(m.head(h)), y.reshape(-1), reduction="none")
    w = torch.arange(1, y.shape[1] + 1, dtype=per.dtype) / y.shape[1]
    return (per.reshape(y.shape) * w).mean()


def classes_second(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).transpose(1, 2), y)


def upcast(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h).float()), y.reshape(-1))


def one_hot(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(m.head(h), -1)
    return -(F.one_hot(y.clamp(min=0), m.vocab).to(p.dtype) * p).sum(-1).mean()


def by_probabilities(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(m.head(h), -1)
    return -torch.log(p.gather(-1, y.clamp(min=0).unsqueeze(-1)) + 1e-6).mean()


def focal(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(m.head(h), -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((1 - p.exp()).pow(2) * p).mean()


def entropy(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(m.head(h), -1)
    hit = p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -hit.mean() - 0.01 * -(p.exp() * p).sum(-1).mean()


def of_labels(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each label, 0 where it is ignored, and which ones count."""
    keep = y != IGNORED
    p = torch.log_softmax(scores, -1).gather(-1, torch.where(keep, y, 0).unsqueeze(-1)).squeeze(-1)
    return p * keep, keep


def of_answers(scores: Tensor, y: Tensor, mean: bool = False) -> Tensor:
    """Returns the log-probability of each sequence of labels, or the mean over its labels."""
    p, keep = of_labels(scores, y)
    return p.sum(-1) / keep.sum(-1).clamp(min=1) if mean else p.sum(-1)


def rejected(m: Model, y: Tensor) -> Tensor:
    """Returns other labels."""
    return torch.where(y == IGNORED, y, (y + 5) % m.vocab)


def frozen(m: Model, y: Tensor) -> Tensor:
    """Returns the scores of a reference model."""
    return F.linear(F.embedding(y.clamp(min=0), m.reference_embed), m.reference_head)


def dpo(m: Model, h: Tensor, y: Tensor) -> Tensor:
    theirs = frozen(m, y)
    ours, other = m.head(h), m.head(torch.tanh(h))
    chosen = of_answers(ours, y) - of_answers(theirs, y)
    return -F.logsigmoid(0.1 * (chosen - of_answers(other, rejected(m, y)) + of_answers(theirs, rejected(m, y)))).mean()


def simpo(m: Model, h: Tensor, y: Tensor) -> Tensor:
    chosen, other = of_answers(m.head(h), y, mean=True), of_answers(m.head(torch.tanh(h)), rejected(m, y), mean=True)
    return -F.logsigmoid(2.0 * (chosen - other) - 0.5).mean()


def orpo(m: Model, h: Tensor, y: Tensor) -> Tensor:
    scores = m.head(h)
    chosen, other = of_answers(scores, y, mean=True), of_answers(m.head(torch.tanh(h)), rejected(m, y), mean=True)
    odds = chosen - other - (torch.log1p(-chosen.exp() + 1e-6) - torch.log1p(-other.exp() + 1e-6))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


def kto(m: Model, h: Tensor, y: Tensor) -> Tensor:
    ratio = of_answers(m.head(h), y) - of_answers(frozen(m, y), y)
    return (1 - torch.sigmoid(0.1 * (ratio - 0.5))).mean()


def grpo(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p, keep = of_labels(m.head(h), y)
    q, _ = of_labels(frozen(m, y), y)
    gain = torch.cos(torch.arange(y.shape[1], dtype=p.dtype)).expand_as(p)
    ratio = torch.exp(p - p.detach())
    gains = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    drift = torch.exp(q - p) - (q - p) - 1
    each = ((gains - 0.04 * drift) * keep).sum(-1) / keep.sum(-1).clamp(min=1)
    return -each.mean()


def ppo(m: Model, h: Tensor, y: Tensor) -> Tensor:
    scores = m.head(h)
    p, keep = of_labels(scores, y)
    old, _ = of_labels(frozen(m, y), y)
    every = torch.log_softmax(scores, -1)
    entropy = -(every.exp() * every).sum(-1)
    ratio = torch.exp((p - old).clamp(-2, 2))
    each = (torch.minimum(ratio, ratio.clamp(0.8, 1.2)) + 0.01 * entropy) * keep
    return -(each.sum(-1) / keep.sum(-1).clamp(min=1)).mean()


def distilled(m: Model, h: Tensor, y: Tensor) -> Tensor:
    ours, theirs = torch.log_softmax(m.head(h) / 2.0, -1), torch.log_softmax(frozen(m, y) / 2.0, -1)
    return F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean() * 4.0


def jsd(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p, q = torch.log_softmax(m.head(h), -1), torch.log_softmax(frozen(m, y), -1)
    middle = torch.log((p.exp() + q.exp()) / 2)
    return (0.5 * (p.exp() * (p - middle)).sum(-1) + 0.5 * (q.exp() * (q - middle)).sum(-1)).mean()


def hardest(m: Model, h: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(flat(m.head(h)), y.reshape(-1), reduction="none").reshape(y.shape).mean(-1)
    return (torch.softmax(each, 0) * each).sum()


def top_k(m: Model, h: Tensor, y: Tensor) -> Tensor:
    scores = m.head(h)
    least = torch.topk(scores, 30, -1).values[..., -1:].detach()
    return F.cross_entropy(flat(scores.masked_fill(scores < least, -30.0)), y.reshape(-1))


def two_views(m: Model, h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an embedding of each token, and another one of the same token."""
    return F.normalize(flat(h), dim=-1), F.normalize(torch.tanh(flat(h) @ m.head.weight.T @ m.head.weight), dim=-1)


def contrastive(m: Model, h: Tensor, y: Tensor) -> Tensor:
    texts, pictures = two_views(m, h)
    scores = texts @ pictures.T / 0.3
    own = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def columns(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """The same without a transpose: rows and columns of the scores are reduced."""
    texts, pictures = two_views(m, h)
    scores = texts @ pictures.T / 0.3
    own = scores.diagonal()
    return (torch.logsumexp(scores, 1) - own).mean() + (torch.logsumexp(scores, 0) - own).mean()


def queue(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """MoCo's loss: the own score beside those of a queue."""
    a, b = two_views(m, h)
    others = a @ F.normalize(m.reference_head, dim=-1).T
    scores = torch.cat([(a * b).sum(-1, keepdim=True), others], -1) / 0.2
    return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.int64))


def adaptive(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """The first ten classes and all others as one, then which of these it is."""
    scores, label = flat(m.head(h)), y.reshape(-1).clamp(min=0).unsqueeze(-1)
    near, far = scores[:, :10], scores[:, 10:]
    first = torch.log_softmax(torch.cat([near, far.logsumexp(-1, keepdim=True)], -1), -1)
    rest = first[:, 10:] + torch.log_softmax(far, -1).gather(-1, (label - 10).clamp(min=0))
    return -torch.where(label < 10, first.gather(-1, label.clamp(max=9)), rest).mean()


def diversity(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """The entropy of the mean prediction."""
    scores = flat(m.head(h))
    mean = torch.softmax(scores, -1).mean(0)
    return F.cross_entropy(scores, y.reshape(-1)) + (mean * torch.log(mean + 1e-8)).sum()


def own_top(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """A reference model on the student's surest classes."""
    top, which = torch.topk(m.head(h), 6, -1)
    ours, theirs = torch.log_softmax(top, -1), torch.log_softmax(frozen(m, y), -1).gather(-1, which)
    return (ours.exp() * (ours - theirs)).sum(-1).mean()


def nt_xent(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """SimCLR's loss: all embeddings are compared with all, and none with itself."""
    every = torch.cat(two_views(m, h))
    n = every.shape[0] // 2
    scores = (every @ every.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e4)
    return F.cross_entropy(scores, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def triplet(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """The own distance against the smallest of the others."""
    a, b = two_views(m, h)
    far = (2 - 2 * (a @ b.T)).clamp(min=1e-6).sqrt()
    others = far.masked_fill(torch.eye(far.shape[0], dtype=torch.bool), 9.0)
    return torch.relu(far.diagonal() - others.min(-1).values + 0.3).mean()


def surest(m: Model, h: Tensor, y: Tensor) -> Tensor:
    scores = m.head(h)
    sure = torch.softmax(scores, -1).max(-1).values
    return F.cross_entropy(flat(scores), y.reshape(-1)) + 0.1 * sure.mean()


def picture(m: Model, h: Tensor) -> Tensor:
    """Returns scores of classes for each pixel, with classes on axis 1, of pictures of one line."""
    return F.conv2d(h.transpose(1, 2).unsqueeze(2), m.head.weight[:, :, None, None])


def pixels(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(picture(m, h), y.unsqueeze(1), weight=m.class_weight)


def neighbours(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Mixes neighbouring pixels."""
    window = m.head.weight[:, :, None, None] * torch.tensor([0.5, 1.0, -0.5])
    s = F.conv2d(h.transpose(1, 2).unsqueeze(2), window, padding=(0, 1))
    return F.cross_entropy(s, y.unsqueeze(1))


def dice(m: Model, h: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(picture(m, h), 1)
    own = F.one_hot(y.clamp(min=0).unsqueeze(1), m.vocab).permute(0, 3, 1, 2).to(p.dtype)
    return 1 - ((2 * (p * own).sum((2, 3)) + 1) / ((p + own).sum((2, 3)) + 1)).mean()


def ctc(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """The recursion of CTC over three steps, for one label with blanks around it."""
    p = torch.log_softmax(m.head(h), -1).transpose(0, 1)
    label = y[:, :1].clamp(min=0)
    path = torch.cat([torch.zeros_like(label), label, torch.zeros_like(label)], 1)
    hit = p.gather(2, path.unsqueeze(0).expand(p.shape[0], -1, -1))
    first = hit[:1].mean(0)
    alpha = torch.cat([first[:, :2], torch.full_like(first[:, 2:], -30.0)], 1)
    for step in (hit.mean(0), hit[-1]):
        alpha = torch.logsumexp(torch.stack([alpha, F.pad(alpha[:, :-1], (1, 0), value=-30.0)]), 0) + step
    return -torch.logsumexp(alpha[:, 1:], -1).mean()


def mixture(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Two softmaxes for each token, mixed."""
    p = torch.softmax(m.head(torch.stack([h, torch.tanh(2 * h)], 2)), -1)
    share = torch.softmax(h[..., :2], -1).unsqueeze(-1)
    return F.nll_loss(flat(torch.log((p * share).sum(2) + 1e-6)), y.reshape(-1))


def off_diagonal(c: Tensor) -> Tensor:
    return (c * (1 - torch.eye(c.shape[0]))).pow(2).sum()


def wide_views(m: Model, h: Tensor) -> tuple[Tensor, Tensor]:
    return m.head(flat(h)), m.head(flat(torch.tanh(2 * h)))


def barlow(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Barlow Twins: correlations of features over the batch."""
    a, b = ((v - v.mean(0)) / (v.var(0, correction=0) + 0.1).sqrt() for v in wide_views(m, h))
    c = a.T @ b / a.shape[0]
    return 0.01 * ((c.diagonal() - 1).pow(2).sum() + 0.005 * off_diagonal(c))


def vicreg(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """VICReg: variance and covariance of features over the batch."""
    views = wide_views(m, h)
    total = F.mse_loss(*views)
    for view in views:
        off = view - view.mean(0)
        c = off.T @ off / (off.shape[0] - 1 + 1e-3)
        spread = (view.var(0, correction=0) + 0.1).sqrt()
        total = total + F.relu(1 - spread).mean() / 2 + off_diagonal(c) / c.shape[0]
    return 0.1 * total


def sinkhorn(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """SwAV: targets of which every class has an equal share, by Sinkhorn's iterations."""
    views = wide_views(m, h)
    total = torch.zeros(())
    for ours, theirs in (views, views[::-1]):
        with torch.no_grad():
            q = torch.exp(theirs.detach() / 2.0).T
            q = q / q.sum()
            for _ in range(3):
                q = q / q.sum(1, keepdim=True) / q.shape[0]
                q = q / q.sum(0, keepdim=True) / q.shape[1]
            q = (q * q.shape[1]).T
        total = total - (q * torch.log_softmax(ours / 0.5, 1)).sum(1).mean() / 2
    return total


def centred(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """DINO: a teacher's scores less their mean over the batch."""
    theirs = frozen(m, y)
    q = torch.softmax((theirs - theirs.mean((0, 1), keepdim=True)) / 0.5, -1)
    return -(q * torch.log_softmax(m.head(h) / 0.7, -1)).sum(-1).mean()


def normalised(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Scores with a batch norm."""
    s = flat(m.head(h))
    s = (s - s.mean(0)) / (s.var(0, correction=0) + 0.1).sqrt()
    return F.cross_entropy(s, y.reshape(-1))


def normed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Scores with a layer norm."""
    return F.cross_entropy(F.layer_norm(flat(m.head(h)), (m.vocab,)), y.reshape(-1))


def pointer(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Copies from the input: attention over the tokens is added at their classes."""
    attention = torch.softmax(h @ h.transpose(1, 2), -1)
    ids = y.clamp(min=0).unsqueeze(1).expand(-1, h.shape[1], -1)
    gate = torch.sigmoid(h[..., :1])
    p = (gate * torch.softmax(m.head(h), -1)).scatter_add(-1, ids, (1 - gate) * attention)
    return -torch.log(p.gather(-1, ((y.clamp(min=0) + 1) % m.vocab).unsqueeze(-1)) + 1e-6).mean()


def allowed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Each example has classes of its own."""
    classes = torch.zeros(y.shape[0], m.vocab).scatter(1, y.clamp(min=0), 1.0)
    s = m.head(h).masked_fill(classes.unsqueeze(1) == 0, -1e4)
    return F.cross_entropy(flat(s), y.clamp(min=0).reshape(-1))


def per_example(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Each example has a temperature of its own."""
    s = m.head(h) / (1 + torch.sigmoid(h.mean((1, 2), keepdim=True)))
    return F.cross_entropy(flat(s), y.reshape(-1))


def mean_embedding(m: Model, h: Tensor, y: Tensor) -> Tensor:
    e = torch.softmax(m.head(h), -1) @ m.reference_embed
    return F.mse_loss(e, F.embedding(y.clamp(min=0), m.reference_embed))


def mmd(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Maximum mean discrepancy with a Gaussian kernel."""
    a, b = two_views(m, h)

    def kernel(x: Tensor, z: Tensor) -> Tensor:
        far = (x * x).sum(1)[:, None] + (z * z).sum(1)[None] - 2 * x @ z.T
        return torch.exp(-2 * far.clamp(min=0)).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def lifted(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Lifted structures: what one row needs of all pairs is added to its column, too."""
    a, b = two_views(m, h)
    far = 2 - 2 * a @ b.T
    group = y.clamp(min=0).reshape(-1) % 3
    same = group[:, None] == group[None, :]
    others = torch.logsumexp(torch.where(same, -1e4, 1 - far), 1)
    return torch.relu(torch.where(same, far + others[:, None] + others[None, :], 0.0)).pow(2).mean()


def ranking(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """ListMLE on a reference model's order of its surest classes."""
    order = torch.topk(frozen(m, y), 5, -1).indices
    s = m.head(h).gather(-1, order)
    return -(s - torch.flip(torch.logcumsumexp(torch.flip(s, [-1]), -1), [-1])).sum(-1).mean()


def distances(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """The own distance against all others, each by differences of features."""
    texts, pictures = two_views(m, h)
    d = torch.cdist(texts, pictures)
    return torch.relu(d.diagonal()[:, None] - d + 0.2).mean()


def prototypes(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Soft k-means: distances of tokens and codes, and the entropy of the mean assignment."""
    d = (flat(h)[:, None] - m.head.weight).pow(2).sum(-1)
    p = torch.softmax(-d, -1)
    share = p.mean(0)
    return (p * d).sum(-1).mean() + 0.1 * (share * torch.log(share + 1e-6)).sum()


def straight_through(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Gumbel-softmax: a hard choice with the slope of the soft one, then the embedding of what was chosen."""
    noise = torch.cos(1.7 * torch.arange(m.vocab, dtype=h.dtype) + 0.3 * y.clamp(min=0).unsqueeze(-1))
    p = torch.softmax((m.head(h) + noise) / 0.7, -1)
    hard = F.one_hot(p.argmax(-1), m.vocab).to(p.dtype)
    return ((hard - p.detach() + p) @ m.reference_embed - h).pow(2).mean()


def late_interaction(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """ColBERT: the nearest token of each document for each token of each query."""
    q = F.normalize(h, dim=-1)
    d = F.normalize(torch.tanh(h) @ m.head.weight.T @ m.head.weight, dim=-1)
    scores = torch.einsum("ash,bth->abst", q, d).amax(-1).sum(-1)
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def pairs_of_tokens(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """A softmax over all starts and ends of a span."""
    scores = (torch.tanh(h) @ m.head.weight.T @ m.head.weight) @ h.transpose(1, 2)
    p = torch.log_softmax(scores.flatten(1), -1)
    return -p.gather(1, y[:, :1].clamp(min=0) % 2).mean()


def sequence_ratio(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """GSPO: one clipped ratio for each answer."""
    ratio = torch.exp(of_answers(m.head(h), y, mean=True) - of_answers(frozen(m, y), y, mean=True))
    gain = torch.cos(torch.arange(ratio.shape[0], dtype=ratio.dtype))
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def unlikely(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Unlikelihood training: what was there before gets less likely."""
    p = torch.log_softmax(m.head(h), -1)
    n = y.shape[1]
    before = y.clamp(min=0).unsqueeze(1).expand(-1, n, -1)
    place = torch.arange(n)
    counts = (place < place[:, None]) & (before != y.clamp(min=0).unsqueeze(-1))
    seen = torch.zeros_like(p).scatter_add(-1, before, counts.to(p.dtype)).clamp(max=1)
    unlikely = -(torch.log((1 - p.exp()).clamp(min=1e-5)) * seen).sum(-1)
    return F.nll_loss(flat(p), y.reshape(-1), ignore_index=IGNORED) + unlikely.mean()


def margin(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """ArcFace: the angle of the own class is widened."""
    c = F.normalize(flat(h), dim=-1) @ F.normalize(m.head.weight, dim=-1).T
    own = y.clamp(min=0).reshape(-1, 1)
    angle = torch.acos(c.gather(1, own).clamp(-0.999, 0.999)) + 0.3
    return F.cross_entropy(8 * c.scatter(1, own, torch.cos(angle)), own.squeeze(1))


def several_tokens(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Predicts three tokens at once, with one head for all of them."""
    hidden = torch.stack([torch.tanh(h * (1.0 + 0.3 * k)) for k in range(3)], 2)
    labels = torch.stack([F.pad(y, (0, k), value=IGNORED)[:, k:] for k in range(3)], 2)
    return F.cross_entropy(m.head(hidden).flatten(0, 2), labels.flatten(), ignore_index=IGNORED)


def scaled(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flat(m.head(h)) / 0.7, y.reshape(-1))


OF_WEIGHTS = ("dynamo", "file")
"""The other exporter makes another parameter of a weight in another shape."""

FORMS: dict[str, Form] = {
    "mean": Form(mean_ce),
    "bias": Form(mean_ce, bias=True),
    "tied": Form(mean_ce, tied=True),
    "nll": Form(by_nll),
    "gather": Form(by_gather),
    "shifted-labels": Form(shifted_labels, tied=True),
    "shifted-scores": Form(shifted_scores),
    "shifted-hidden": Form(shifted_hidden, shortest=3),  # torch.export takes one token left over for a size of its own
    "counted": Form(counted, bias=True),
    "softcap": Form(softcap),
    "smoothing": Form(smoothed, exporters=("file",)),  # dynamo leaves label_smoothing out, legacy refuses it
    "smoothing-by-hand": Form(smoothed_by_hand),
    "z-loss": Form(z_loss),
    "z-loss-masked": Form(z_loss_masked),
    "class-weights": Form(weighted),
    "sum": Form(summed),
    "none": Form(each),
    "none-weighted": Form(each_weighted),
    "classes-second": Form(classes_second),
    "one-hot": Form(one_hot, ignores=False),
    "probabilities": Form(by_probabilities, ignores=False),
    "focal": Form(focal, ignores=False),
    "entropy": Form(entropy, ignores=False),
    "temperature": Form(scaled),
    "dpo": Form(dpo),
    "simpo": Form(simpo),
    "orpo": Form(orpo),
    "kto": Form(kto),
    "grpo": Form(grpo, exporters=("file",)),  # ONNX has no `detach`
    "ppo": Form(ppo),
    "distillation": Form(distilled, ignores=False),
    "jsd": Form(jsd, ignores=False),
    "hardest": Form(hardest),
    "top-k": Form(top_k),
    "contrastive": Form(contrastive, ignores=False),
    "columns": Form(columns, ignores=False, exporters=OF_WEIGHTS),  # legacy writes the diagonal with an If
    "queue": Form(queue, ignores=False),
    "adaptive": Form(adaptive, ignores=False),
    "diversity": Form(diversity),
    "own-top": Form(own_top, ignores=False),
    "nt-xent": Form(nt_xent, ignores=False),
    "triplet": Form(triplet, ignores=False, exporters=OF_WEIGHTS),
    "surest": Form(surest),
    "pixels": Form(pixels, exporters=OF_WEIGHTS),
    "neighbours": Form(neighbours, exporters=("file",)),  # others fold weights times a constant
    "dice": Form(dice, ignores=False, exporters=OF_WEIGHTS),
    "ctc": Form(ctc, ignores=False),
    "mixture": Form(mixture),
    "barlow": Form(barlow, ignores=False, exporters=OF_WEIGHTS),  # legacy writes the diagonal with an If
    "vicreg": Form(vicreg, ignores=False),
    "sinkhorn": Form(sinkhorn, ignores=False, exporters=("file",)),  # of frozen targets, and ONNX has no `detach`
    "centred": Form(centred, ignores=False),
    "normalised": Form(normalised),
    "normed": Form(normed),
    "pointer": Form(pointer, ignores=False),
    "allowed": Form(allowed, ignores=False),
    "per-example": Form(per_example),
    "mean-embedding": Form(mean_embedding, ignores=False),
    "mmd": Form(mmd, ignores=False),
    "lifted": Form(lifted, ignores=False),
    "ranking": Form(ranking, ignores=False, exporters=("file",)),  # ONNX has no `logcumsumexp`
    "distances": Form(distances, ignores=False, exporters=("file",)),  # others export no diagonal, or no `cdist`
    "prototypes": Form(prototypes, ignores=False),
    "straight-through": Form(straight_through, ignores=False, exporters=("file",)),  # ONNX has no `detach`
    "late-interaction": Form(late_interaction, ignores=False),
    "pairs-of-tokens": Form(pairs_of_tokens, ignores=False),
    "sequence-ratio": Form(sequence_ratio),
    "unlikely": Form(unlikely, ignores=False, exporters=OF_WEIGHTS),  # legacy writes `zeros_like` by data
    "margin": Form(margin, ignores=False, exporters=("file",)),  # others fold the norm of the weight
    "several-tokens": Form(several_tokens),
    "bf16": Form(mean_ce, half=True),
    "bf16-upcast": Form(upcast, half=True, bias=True),
    "bf16-shifted-tied": Form(shifted_labels, half=True, tied=True),
    "bf16-softcap": Form(softcap, half=True),
}


def export(model: Model, folder: Path, exporter: str) -> Path:
    """Writes the model to a file, with symbolic batch and length."""
    ids, labels = torch.zeros((3, 5), dtype=torch.int64), torch.ones((3, 5), dtype=torch.int64)
    names = ["input_ids", "labels"]
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if exporter == "legacy":
            path = folder / "model.onnx"
            axes = {name: {0: "batch", 1: "seq"} for name in names}
            torch.onnx.export(
                model, (ids, labels), str(path), input_names=names, output_names=["loss"], dynamic_axes=axes,
                opset_version=18, dynamo=False,
            )  # fmt: skip
            return path
        sizes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("seq", min=model.form.shortest)}
        if exporter == "file":
            program = torch.export.export(
                model, (ids, labels), dynamic_shapes=dict.fromkeys(names, sizes), strict=False
            )
            torch.export.save(program, folder / "model.pt2")
            return folder / "model.pt2"
        program = torch.onnx.export(
            model, (ids, labels), dynamo=True, opset_version=18, dynamic_shapes=dict.fromkeys(names, sizes),
            input_names=names, output_names=["loss"], verbose=False,
        )  # fmt: skip
        path = folder / "model.onnx"
        program.save(str(path))
        return path


def tokens(batch: int, seq: int, ignored: str, draw: int = 0) -> dict[str, np.ndarray]:
    n = np.random.default_rng([batch, seq, draw])
    labels = n.integers(0, VOCAB, (batch, seq))
    if ignored == "all":
        labels[:] = IGNORED
    elif ignored == "some":
        labels.reshape(-1)[2::5] = IGNORED
    return {"input_ids": n.integers(0, VOCAB, (batch, seq)), "labels": labels}


def reference(model: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns PyTorch's loss and gradients; a tied weight under its first name."""
    model.zero_grad()
    loss = model(*(torch.from_numpy(feed[name]) for name in ("input_ids", "labels")))
    loss.backward()
    found = {f"{name}.grad": p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double().numpy(), **found}


class Case:
    def __init__(self, compiler: Compiler, name: str, exporter: str, folder: Path, n_draws: int) -> None:
        self.compiler, self.form, self.exporter, self.folder = compiler, FORMS[name], exporter, folder
        self.n_draws = n_draws
        self.model = Model(self.form).eval()
        if self.form.half:
            self.model = self.model.bfloat16()
        self.wrong: list[str] = []
        self.notes: list[str] = []

    def check(self) -> list[str]:
        source = export(self.model, self.folder, self.exporter)
        common = ("--loss", self.look(source), "--policy", "none")
        whole, cut = self.folder / "whole.onnx", self.folder / "cut.onnx"
        self.compiler.call(source, "-o", whole, *common)
        report = self.compiler.call_json(source, "-o", cut, *common, "--tile-loss", str(CHUNKS))
        chunks = list(report["tiled"].values())
        if set(chunks) != {CHUNKS} or any("stay whole" in line for line in report["warnings"]):
            return [f"chunks {chunks}: {' '.join(report['warnings'])}"]
        missing = sorted(self.trained - {told for told, _ in self.names.values()})
        if missing:
            return [f"no parameter of the file is {', '.join(missing)}"]
        kinds: tuple[str, ...] = ("none", "some", "all") if self.form.ignores else ("none",)
        if self.form.half:
            self.judge_draws(kinds[-2:][0], cut)
            kinds = kinds[2:]
        for batch, seq in ((3, 7), (1, self.form.shortest)):
            for ignored in kinds if batch > 1 else kinds[:1]:
                self.compare(tokens(batch, seq, ignored), f"{batch}×{seq}, {ignored} ignored", whole, cut)
        return self.wrong

    def look(self, source: Path) -> str:
        """Reads the names of inputs and parameters. Returns the option that names the loss, the first output."""
        inspected = self.compiler.inspect(source)
        self.inputs = [i["name"] for i in inspected["inputs"]]
        own = dict(self.model.named_parameters())
        self.trained = set(own)
        first = {id(p): name for name, p in own.items()}
        every = self.model.named_parameters(remove_duplicate=False)
        shared = {name: first[id(p)] for name, p in every}
        self.names = {
            p["initializer"]: (shared.get(p["name"], p["name"]), p["transposed"]) for p in inspected["parameters"]
        }
        return f"output:{inspected['outputs'][0]['name']}"

    def judge_draws(self, ignored: str, graph: Path) -> None:
        """Compares errors of a form in bfloat16 against float64, over draws of weights and tokens."""
        ours: dict[str, list[np.ndarray]] = {}
        theirs: dict[str, list[np.ndarray]] = {}
        for draw in range(self.n_draws):
            model = Model(self.form, draw).eval().bfloat16()
            feed = tokens(3, 7, ignored, draw)
            exact, eager = reference(Model64(model), feed), reference(model, feed)
            found = self.ours(self.with_weights(graph, model), feed)
            for name, want in exact.items():
                ours.setdefault(name, []).append(np.abs(found[name] - want).reshape(-1))
                theirs.setdefault(name, []).append(np.abs(eager[name] - want).reshape(-1))
        small: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        for name, own in ours.items():
            every = np.concatenate(theirs[name])
            if every.size >= FEWEST:
                self.judge(name, own, theirs[name])
                continue
            unit = max(tolerance.root_mean_square(every), np.finfo(np.float64).tiny)
            rms = tolerance.root_mean_square(np.concatenate(own)) / unit
            self.notes.append(f"{name}: {every.size} errors only, root mean square {rms:.2f} of PyTorch's")
            small.append(([e / unit for e in own], [e / unit for e in theirs[name]]))
        if small:
            sides = (zip(*(pair[side] for pair in small), strict=True) for side in (0, 1))
            self.judge("small tensors together", *([np.concatenate(draw) for draw in side] for side in sides))

    def judge(self, name: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
        """Compares absolute errors by draw, in both norms."""
        rms, of = (tolerance.root_mean_square(np.concatenate(errors)) for errors in (ours, theirs))
        tops = [[tolerance.largest_element(e) for e in errors] for errors in (ours, theirs)]
        ratios = [1.0 if a == b else a / b if b else np.inf for a, b in zip(*tops, strict=True)]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75), method="nearest")
        self.notes.append(
            f"{name}: error over PyTorch's: root mean square {rms / of if of else float(rms > 0):.2f}, largest {middle:.2f} "
            f"({low:.2f}–{high:.2f})"
        )
        if rms > tolerance.HALF_PRECISION_FACTOR * of or middle > tolerance.HALF_PRECISION_FACTOR:
            self.wrong.append(self.notes[-1])

    def with_weights(self, graph: Path, model: Model) -> Path:
        """Returns the file with other weights."""
        proto = onnx.load(graph)
        own = dict(model.named_parameters())
        for initializer in proto.graph.initializer:
            told, transposed = self.names.get(initializer.name, ("", False))
            if told in own:
                tensor = own[told].detach()
                tensor = (tensor.T if transposed else tensor).contiguous()
                assert list(initializer.dims) == list(tensor.shape), initializer.name
                initializer.ClearField("int32_data")
                initializer.raw_data = tensor.view(torch.uint16).numpy().tobytes()
        path = graph.with_stem(f"{graph.stem}-drawn")
        onnx.save(proto, path)
        return path

    def ours(self, graph: Path, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.renamed(self.compiler.run_tensors(graph, self.named(feed), self.folder))

    def named(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the feed under the file's input names: torch.export may rename inputs but keeps their order, and exporters
        may leave out what is not read."""
        if set(self.inputs) <= set(feed):
            return {name: feed[name] for name in self.inputs}
        return dict(zip(self.inputs, feed.values(), strict=True))

    def renamed(self, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Under the names of PyTorch's parameters and as they lie there, in float64. Exporters may write a tied weight
        twice, once transposed: its gradient is the sum of theirs."""
        result = {"loss": found["loss"].astype(np.float64)}
        for name, tensor in found.items():
            if name.endswith(".grad"):
                told, transposed = self.names.get(name[:-5], (name[:-5], False))
                if told not in self.trained:
                    continue  # The legacy exporter does not say what is a buffer.
                tensor = (tensor.T if transposed else tensor).astype(np.float64)
                result[f"{told}.grad"] = result.get(f"{told}.grad", 0.0) + tensor
        return result

    def compare(self, feed: dict[str, np.ndarray], what: str, whole: Path, cut: Path) -> None:
        want, got = reference(self.model, feed), self.ours(cut, feed)
        # Against the whole graph once.
        untiled = self.ours(whole, feed) if what.startswith("3×7, none") else got
        for name, tensor in got.items():
            if tensor.shape != want[name].shape:
                self.wrong.append(f"{what}: {name} has the shape {tensor.shape}")
                return
        if any(not np.isfinite(w).all() for w in want.values()):
            for name, w in want.items():
                for other, told in ((got, "tiled"), (untiled, "whole")):
                    if not np.array_equal(np.isfinite(other[name]), np.isfinite(w)):
                        self.wrong.append(f"{what}: {told} {name} is not finite where PyTorch's is, or the reverse")
            return
        if self.form.half:
            return
        top = tolerance.largest({n: w for n, w in want.items() if n != "loss"})
        for other, told in ((want, "PyTorch"), ({n: untiled[n] for n in want}, "the whole loss")):
            worst = tolerance.compare(got, other, top)
            if not worst.agrees:
                self.wrong.append(f"{what}: against {told} {worst}")
        worst = tolerance.compare(self.elsewhere(cut, feed), {n: got[n] for n in want}, top)
        if not worst.agrees:
            self.wrong.append(f"{what}: in ONNX Runtime {worst}")

    def elsewhere(self, graph: Path, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.renamed(run_ort(graph, self.named(feed)))


def Model64(model: Model) -> Model:
    """Returns the same weights in float64."""
    exact = Model(model.form).eval().double()
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    return exact


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--only", type=options.words_of(FORMS), default=list(FORMS), help="comma-separated names")
    parser.add_argument("--exporters", type=options.words_of(EXPORTERS), default=list(EXPORTERS))
    parser.add_argument("--draws", type=int, default=64, help="draws of weights and tokens, for bfloat16 [default: 64]")
    parser.add_argument("--keep", type=Path, help="keep the files in this folder")
    arguments = parser.parse_args()
    compiler = Compiler(arguments.ckpt_opt)
    failed = held = 0
    with options.folder_or_scratch(arguments.keep) as kept:
        for name in arguments.only:
            for exporter in arguments.exporters:
                if exporter not in FORMS[name].exporters:
                    continue
                folder = kept / f"{name}-{exporter}"
                folder.mkdir(exist_ok=True)
                case = Case(compiler, name, exporter, folder, arguments.draws)
                try:
                    wrong = case.check()
                except Refused as refused:
                    wrong = [str(refused)]
                except (torch.onnx.errors.OnnxExporterError, torch._dynamo.exc.UserError) as error:
                    print(f"{name} {exporter}: not exported: {str(error).splitlines()[0]}", flush=True)
                    continue
                held += not wrong
                failed += bool(wrong)
                print(f"{name} {exporter}: {'holds' if not wrong else ''}", flush=True)
                for line in wrong + [note for note in case.notes if note not in wrong]:
                    print(f"  {line}", flush=True)
    print(f"{held} hold, {failed} do not")
    return 1 if failed else 0
