"""All steps of the kit, in order, with their time limits in seconds."""

from __future__ import annotations

from tools.cuda import correctness, package, training
from tools.cuda.models import NAMES, UNPLANNED
from tools.cuda.runner import TOGETHER, Step
from tools.cuda.training import FUSED, GRAPHS

LLAMA, GPT2 = NAMES
FIRST, TRAINING = "machine", "training"

# The first steps read gigabytes of libraries from a disk that has none of them in its cache.
STEPS = [
    Step("environment", FIRST, 20, correctness.environment),
    Step("doctor", FIRST, 25, correctness.doctor),
    Step("fixture", FIRST, 60, correctness.fixture),
    Step("weights", TOGETHER, 60, correctness.weights),
    Step("PyTorch", TOGETHER, 60, correctness.pytorch),
    Step("verify", TOGETHER, 75, correctness.verify),
    Step("repeat", TOGETHER, 75, correctness.repeat),
    Step("offload", TOGETHER, 75, correctness.offload),
    Step("CUDA graphs", TOGETHER, 90, correctness.cuda_graphs),
    Step("fused kernels", TOGETHER, 60, correctness.fused_kernels),
    Step("attention", TOGETHER, 45, correctness.attention),
    Step("16-bit products", TOGETHER, 30, correctness.products),
    Step("ranks", TOGETHER, 60, correctness.ranks),
    Step("llama unplanned", TRAINING, 40, training.ours(LLAMA, UNPLANNED)),
    Step("llama planned", TRAINING, 35, training.ours(LLAMA, "planned")),
    Step("llama tiled loss", TRAINING, 35, training.ours(LLAMA, "tiled-loss")),
    Step("llama offload", TRAINING, 35, training.ours(LLAMA, "offload")),
    Step("llama CUDA graphs", TRAINING, 25, training.ours(LLAMA, "planned", GRAPHS)),
    Step("llama PyTorch eager", TRAINING, 40, training.theirs(LLAMA, "eager")),
    Step("llama gradients", TRAINING, 40, training.gradients(LLAMA)),
    Step("llama fused kernels", TRAINING, 25, training.ours(LLAMA, UNPLANNED, FUSED)),
    Step("llama whole step", TRAINING, 25, training.ours(LLAMA, "sgd")),
    Step("llama whole step in 14.5 GB", TRAINING, 25, training.ours(LLAMA, "sgd-14.5GB")),
    Step("llama whole step in 8 GB", TRAINING, 25, training.ours(LLAMA, "sgd-8GB")),
    Step("llama PyTorch checkpointed", TRAINING, 30, training.theirs(LLAMA, "checkpointed")),
    Step("llama times by op", TRAINING, 40, training.times(LLAMA, UNPLANNED, "planned", "tiled-loss")),
    Step("gpt2 unplanned", TRAINING, 15, training.ours(GPT2, UNPLANNED)),
    Step("gpt2 planned", TRAINING, 15, training.ours(GPT2, "planned")),
    Step("gpt2 tiled loss", TRAINING, 15, training.ours(GPT2, "tiled-loss")),
    Step("gpt2 offload", TRAINING, 15, training.ours(GPT2, "offload")),
    Step("gpt2 CUDA graphs", TRAINING, 15, training.ours(GPT2, "planned", GRAPHS)),
    Step("gpt2 fused kernels", TRAINING, 15, training.ours(GPT2, UNPLANNED, FUSED)),
    Step("gpt2 fused kernels and CUDA graphs", TRAINING, 15, training.ours(GPT2, UNPLANNED, FUSED, GRAPHS)),
    Step("gpt2 PyTorch eager", TRAINING, 30, training.theirs(GPT2, "eager")),
    Step("gpt2 gradients", TRAINING, 25, training.gradients(GPT2)),
    Step("gpt2 PyTorch checkpointed", TRAINING, 30, training.theirs(GPT2, "checkpointed")),
    Step("gpt2 times by op", TRAINING, 20, training.times(GPT2, UNPLANNED, "planned", "tiled-loss")),
    Step("gpt2 PyTorch package", TRAINING, 75, package.op_by_op(GPT2)),
    Step("gpt2 PyTorch memory budget", TRAINING, 80, training.theirs(GPT2, "memory budget")),
    Step("gpt2 PyTorch package compiled", TRAINING, 80, package.fused(GPT2)),
    Step("gpt2 PyTorch compiled", TRAINING, 50, training.theirs(GPT2, "compiled")),
    Step("llama PyTorch memory budget", TRAINING, 90, training.theirs(LLAMA, "memory budget")),
    Step("llama PyTorch package compiled", TRAINING, 90, package.fused(LLAMA)),
    Step("llama PyTorch compiled", TRAINING, 90, training.theirs(LLAMA, "compiled")),
]
