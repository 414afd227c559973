"""Head and loss in chunks give the gradients of PyTorch up to rounding, in the memory that was predicted."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_opt
from ckpt_opt.prices import allocated_bytes

CLASSES = 500
Loss = Callable[[torch.Tensor, torch.Tensor], Any]


class Decoder(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float32, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.table = nn.Embedding(CLASSES, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.loss(self.head(x), labels)


def entropy(scores: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.float().view(-1, CLASSES), labels.view(-1), **options)


def capped(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(30 * torch.tanh(scores / 30), labels)


def with_z_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(scores, labels) + 1e-3 * torch.logsumexp(scores, -1).pow(2).mean()


def by_hand(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = labels != -100
    chosen = torch.log_softmax(scores, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * kept).sum() / kept.sum()


def shifted_scores(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


MODELS: dict[str, Callable[[], Decoder]] = {
    "mean": lambda: Decoder(entropy),
    "sum": lambda: Decoder(lambda x, y: entropy(x, y, reduction="sum")),
    "none": lambda: Decoder(lambda x, y: entropy(x, y, reduction="none").square().mean()),
    "smoothing": lambda: Decoder(lambda x, y: entropy(x, y, label_smoothing=0.1)),
    "weights": lambda: Decoder(lambda x, y: entropy(x, y, weight=torch.linspace(1, 2, CLASSES))),
    "softcap": lambda: Decoder(capped),
    "z-loss": lambda: Decoder(with_z_loss),
    "by hand": lambda: Decoder(by_hand),
    "shifted scores": lambda: Decoder(shifted_scores),
    "shifted softcap": lambda: Decoder(lambda x, y: shifted_scores(30 * torch.tanh(x / 30), y)),
    "bias": lambda: Decoder(entropy, bias=True),
    "tied": lambda: Decoder(entropy, tied=True),
}


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels, of which some do not count. The tokens do not divide evenly into chunks."""
    ids = torch.randint(0, CLASSES, (rows, 33))
    labels = ids.roll(-1, 1)
    labels[:, :5] = -100
    return ids, labels


def gradients(model: nn.Module, step: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the loss and the gradients of a multiple of it."""
    model.zero_grad(set_to_none=True)
    loss = step(*inputs)
    (0.37 * loss).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference, as a share of the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(float((found[name] - g).abs().max()) for name, g in expected.items()) / largest


def excess(model: nn.Module, step: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> int:
    """Returns the bytes that a step takes above those that were predicted."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    plan = ckpt_opt.last_plans[-1]
    measured, _ = allocated_bytes(lambda: step(*inputs).backward())
    predicted = plan.peak_bytes if plan.compiled_peak_bytes is None else plan.compiled_peak_bytes
    return measured - (predicted - plan.static_bytes)


def compiled(model: nn.Module, budget: str, **options: Any) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "on_infeasible": "smallest"} | options
    step: Callable[..., torch.Tensor] = torch.compile(
        lambda *inputs: model(*inputs), backend=ckpt_opt.backend(budget, **options), dynamic=False
    )
    return step


@pytest.mark.parametrize("form", MODELS)
def test_a_loss_in_chunks_has_the_gradients_of_the_whole_loss(form: str) -> None:
    model, inputs = MODELS[form](), batch()
    expected = gradients(model, model, *inputs)
    gradients(model, compiled(model, "100%"), *inputs)
    whole = ckpt_opt.last_plans[-1]
    step = compiled(model, "100%", tile_loss=4)
    unplanned = gradients(model, step, *inputs)
    plan = ckpt_opt.last_plans[-1]
    assert plan.loss_chunks == 4 and whole.loss_chunks == 1
    assert plan.peak_bytes - plan.static_bytes < 0.6 * (whole.peak_bytes - whole.static_bytes)
    assert difference(unplanned, expected) <= 1e-6
    assert abs(excess(model, step, *inputs)) <= 64
    step = compiled(model, "70%", tile_loss=4)
    planned = gradients(model, step, *inputs)
    assert ckpt_opt.last_plans[-1].peak_bytes < plan.peak_bytes
    assert all(torch.equal(planned[name], gradient) for name, gradient in unplanned.items())
    assert abs(excess(model, step, *inputs)) <= 64


def test_sums_of_16_bit_terms_are_not_rounded_between_chunks() -> None:
    inputs = batch(8)
    exact = Decoder(entropy, torch.bfloat16).double()
    model = Decoder(entropy, torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    wanted = exact.head.weight
    gradients(exact, exact, *inputs)
    assert wanted.grad is not None
    errors = []
    for step in (model, compiled(model, "100%", tile_loss=33)):
        found = gradients(model, step, *inputs)["head.weight"]
        errors.append(float((found.double() - wanted.grad).norm() / wanted.grad.norm()))
    assert errors[1] < 1.2 * errors[0]


def test_two_backward_passes_have_the_same_gradients() -> None:
    model, inputs = Decoder(entropy), batch()
    loss = compiled(model, "100%", tile_loss=4)(*inputs)
    (once,) = torch.autograd.grad(loss, model.head.weight, torch.tensor(3.0), retain_graph=True)
    (again,) = torch.autograd.grad(loss, model.head.weight, torch.tensor(3.0))
    assert torch.equal(once, again)


def test_chunks_are_offloaded() -> None:
    model, inputs = Decoder(entropy), batch()
    unplanned = gradients(model, compiled(model, "100%", tile_loss=4), *inputs)
    found = gradients(model, compiled(model, "70%", tile_loss=4, offload="cpu"), *inputs)
    assert ckpt_opt.last_plans[-1].offloaded
    assert all(torch.equal(found[name], gradient) for name, gradient in unplanned.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_compiles_a_loss_in_chunks(dtype: torch.dtype) -> None:
    model, inputs = Decoder(entropy, dtype), batch(16)
    expected = gradients(model, model, *inputs)
    gradients(model, compiled(model, "100%", inner="inductor"), *inputs)
    whole = ckpt_opt.last_plans[-1].compiled_peak_bytes
    step = compiled(model, "100%", tile_loss=8, inner="inductor")
    assert difference(gradients(model, step, *inputs), expected) <= (1e-6 if dtype is torch.float32 else 0.01)
    plan = ckpt_opt.last_plans[-1]
    assert whole is not None and plan.compiled_peak_bytes is not None and plan.compiled_peak_bytes < 0.8 * whole
    assert plan.loss_chunks == 8
    assert abs(excess(model, step, *inputs)) <= 64


def test_as_many_chunks_as_make_the_scores_as_large_as_the_activations() -> None:
    plan = ckpt_opt.plan_module(Decoder(entropy), *batch(), budget="100%", tile_loss="auto")
    assert plan.loss_chunks == 16  # 500 scores from 32 activations.
    assert "the loss is computed in 16 chunks" in str(plan)
    plan = ckpt_opt.plan_module(Decoder(entropy), *batch(1), budget="100%", tile_loss=100)
    assert plan.loss_chunks == 33


REFUSALS: dict[str, tuple[Callable[[], Decoder], str]] = {
    "returned": (lambda: Decoder(lambda x, y: (entropy(x, y), x)), "results of the compiled function"),
    "half": (lambda: Decoder(entropy, torch.float16), "float16"),
    "no labels": (lambda: Decoder(lambda x, y: x.square().mean()), "no head was found"),
    "two slices": (
        lambda: Decoder(lambda x, y: shifted_scores(x, y) + entropy(x[:, 1:].contiguous(), y[:, 1:].contiguous())),
        "several slices",
    ),
    "half a slice": (lambda: Decoder(lambda x, y: shifted_scores(x, y) + x.square().mean(-1).sum()), "does not read"),
    "among tokens": (lambda: Decoder(lambda x, y: entropy(x.softmax(1), y)), "works along the tokens"),
}


@pytest.mark.parametrize("form", REFUSALS)
def test_what_cannot_be_cut_is_said_and_computed_whole(form: str) -> None:
    make, reason = REFUSALS[form]
    model, inputs = make(), batch()

    def loss_of(result: Any) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result

    expected = gradients(model, lambda *given: loss_of(model(*given)), *inputs)
    step = compiled(model, "100%", tile_loss=4)
    with pytest.warns(ckpt_opt.PlanWarning, match=f"not computed in chunks: .*{reason}"):
        found = gradients(model, lambda *given: loss_of(step(*given)), *inputs)
    assert ckpt_opt.last_plans[-1].loss_chunks == 1
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_dynamic_sizes_are_not_cut() -> None:
    model = Decoder(entropy)
    step = torch.compile(model, backend=ckpt_opt.backend("100%", inner="aot_eager", tile_loss=4), dynamic=True)
    with pytest.warns(ckpt_opt.PlanWarning, match="sizes are dynamic"):
        step(*batch()).backward()


@pytest.mark.parametrize("chunks", [0, -1, 2.5, True, "many"])
def test_a_number_of_chunks_that_means_nothing_is_refused(chunks: object) -> None:
    with pytest.raises(ValueError, match="tile_loss"):
        ckpt_opt.backend("60%", tile_loss=chunks)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_models_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if family == "Llama":
        config = transformers.LlamaConfig(
            vocab_size=CLASSES, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=CLASSES, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config).eval()  # Dropout aside.
        model.loss_type = "ForCausalLM"
    ids, labels = batch()

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]

    expected = gradients(model, loss, ids, labels)
    backend = ckpt_opt.backend("70%", inner="aot_eager", tile_loss="auto", on_infeasible="smallest")
    step = torch.compile(loss, backend=backend, dynamic=False, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ckpt_opt.PlanWarning)
        assert difference(gradients(model, step, ids, labels), expected) <= 1e-6
    assert ckpt_opt.last_plans[-1].loss_chunks == 16
    assert abs(excess(model, step, ids, labels)) <= 64
