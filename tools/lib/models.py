"""Transformers with random weights, as PyTorch modules and as exported files. Nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as tf

from tools.lib import matching, tolerance
from tools.lib.reference import Reference

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TINY = dict(vocab_size=347, n_positions=128, n_embd=24, n_layer=2, n_head=4, n_inner=40, bos_token_id=0, eos_token_id=0)

LLAMA_1B = dict(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=500000.0),
)  # fmt: skip
LLAMA_TINY = LLAMA_1B | dict(vocab_size=347, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, head_dim=8)  # fmt: skip
# That of `fixtures/llama32`.
LLAMA_FIXTURE = LLAMA_1B | dict(
    vocab_size=347, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, max_position_embeddings=256, rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
                         high_freq_factor=4.0, original_max_position_embeddings=8192),
)  # fmt: skip
# A large vocabulary beside a narrow model, as in Llama-3.2-1B.
LLAMA_SMALL = LLAMA_1B | dict(vocab_size=32768, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
                              num_attention_heads=8, num_key_value_heads=2)  # fmt: skip

# Model class, configuration, and the loss as `--loss` names it.
MODELS: dict[str, tuple[type, tf.PretrainedConfig, str]] = {
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(use_cache=False, **NO_DROPOUT), "causal-lm"),
    "tiny": (tf.GPT2LMHeadModel, tf.GPT2Config(use_cache=False, **NO_DROPOUT, **TINY), "causal-lm"),
    "bert": (
        tf.BertForMaskedLM,
        tf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "cross-entropy",
    ),
    "llama1b": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_1B), "causal-lm"),
    "llama_small": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_SMALL), "causal-lm"),
    "llama_fixture": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_FIXTURE), "causal-lm"),
    "llama_tiny": (tf.LlamaForCausalLM, tf.LlamaConfig(use_cache=False, **LLAMA_TINY), "causal-lm"),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PREFIX = "model."
"""`export` puts this before the name of every parameter."""
Step = Callable[[], tuple[torch.Tensor, ...]]


def build(name: str, dtype: torch.dtype, **changes: int) -> torch.nn.Module:
    """Builds a model of `MODELS` in evaluation mode, from a fixed seed. `changes` are fields of its configuration."""
    model_class, config, _ = MODELS[name]
    config = copy.deepcopy(config)
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        # Norm weights start as ones and biases as zeros: the exporter would merge equal ones.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(dtype)


def export(model: torch.nn.Module, path: Path) -> None:
    """Writes token ids → logits as ONNX, with symbolic `batch` and `seq`."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    program = torch.onnx.export(
        Logits(), (), kwargs={"input_ids": torch.zeros((2, 16), dtype=torch.int64)}, dynamo=True, opset_version=18,
        input_names=["input_ids"], dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}}, output_names=["logits"],
        verbose=False,
    )  # fmt: skip
    program.save(str(path), external_data=True)


def random_tokens(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
    """Returns token ids [batch, seq] that depend on the sizes only."""
    torch.manual_seed(batch * seq)
    return torch.randint(3, model.config.vocab_size, (batch, seq))


def eager_step(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    """Returns a function that computes the loss and the gradients of all trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> tuple[torch.Tensor, ...]:
        loss = model(input_ids=tokens, labels=tokens).loss
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def gradients_by_name(model: torch.nn.Module, gradients: tuple[torch.Tensor | None, ...]) -> dict[str, np.ndarray]:
    """Returns the results of `eager_step` under the names of the exported file, in float64."""
    names = [PREFIX + name for name, p in model.named_parameters() if p.requires_grad]
    return {n: g.cpu().double().numpy() for n, g in zip(names, gradients, strict=True) if g is not None}


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Returns the further names of parameters that have several, each with the first name."""
    first = {id(p): PREFIX + name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {PREFIX + name: first[id(p)] for name, p in every if PREFIX + name != first[id(p)]}


def judge_gradients(
    table: list[dict],
    found: dict[str, np.ndarray],
    model: torch.nn.Module,
    theirs: dict[str, np.ndarray],
    exact: dict[str, np.ndarray] | None,
) -> tuple[tolerance.Worst, tolerance.Worst | None]:
    """Compares gradients of a training graph with PyTorch's.

    `table` lists the graph's parameters as `inspect` does, `found` holds its outputs. Without `exact` both are float32.
    Else the error against the float64 gradients `exact` is compared with the error of PyTorch's own: first by the root
    mean square of each tensor, then by its largest element.
    """
    same = matching.match(table, Reference(theirs, tied_names(model)), None)
    ours, wanted = same.gradients(found, theirs)
    if exact is None:
        return tolerance.compare(ours, wanted, tolerance.largest(wanted)), None
    wide = same.gradients(found, exact)[1]
    return (
        tolerance.compare_half(ours, wanted, wide, tolerance.root_mean_square),
        tolerance.compare_half(ours, wanted, wide),
    )
