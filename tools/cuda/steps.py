"""All steps of the kit, in order, with their time limits in seconds."""

from __future__ import annotations

from tools.cuda import correctness, training
from tools.cuda.models import NAMES, UNPLANNED
from tools.cuda.runner import TOGETHER, Step

LLAMA, GPT2 = NAMES
FIRST, TRAINING = "machine", "training"

STEPS = [
    Step("environment", FIRST, 15, correctness.environment),
    Step("doctor", FIRST, 15, correctness.doctor),
    Step("fixture", FIRST, 30, correctness.fixture),
    Step("weights", TOGETHER, 60, correctness.weights),
    Step("verify", TOGETHER, 75, correctness.verify),
    Step("repeat", TOGETHER, 75, correctness.repeat),
    Step("offload", TOGETHER, 75, correctness.offload),
    Step("CUDA graphs", TOGETHER, 75, correctness.cuda_graphs),
    Step("fused kernels", TOGETHER, 60, correctness.fused_kernels),
    Step("attention", TOGETHER, 45, correctness.attention),
    Step("16-bit products", TOGETHER, 30, correctness.products),
    Step("llama unplanned", TRAINING, 40, training.ours(LLAMA, UNPLANNED)),
    Step("llama planned", TRAINING, 35, training.ours(LLAMA, "planned")),
    Step("llama tiled loss", TRAINING, 35, training.ours(LLAMA, "tiled-loss")),
    Step("llama offload", TRAINING, 35, training.ours(LLAMA, "offload")),
    Step("llama CUDA graphs", TRAINING, 25, training.ours(LLAMA, "planned", cuda_graphs=True)),
    Step("llama PyTorch eager", TRAINING, 30, training.theirs(LLAMA, "eager")),
    Step("llama gradients", TRAINING, 40, training.gradients(LLAMA)),
    Step("llama PyTorch checkpointed", TRAINING, 30, training.theirs(LLAMA, "checkpointed")),
    Step("llama PyTorch memory budget", TRAINING, 70, training.theirs(LLAMA, "memory budget")),
    Step("gpt2 unplanned", TRAINING, 15, training.ours(GPT2, UNPLANNED)),
    Step("gpt2 planned", TRAINING, 15, training.ours(GPT2, "planned")),
    Step("gpt2 tiled loss", TRAINING, 15, training.ours(GPT2, "tiled-loss")),
    Step("gpt2 offload", TRAINING, 15, training.ours(GPT2, "offload")),
    Step("gpt2 CUDA graphs", TRAINING, 15, training.ours(GPT2, "planned", cuda_graphs=True)),
    Step("gpt2 PyTorch eager", TRAINING, 20, training.theirs(GPT2, "eager")),
    Step("gpt2 gradients", TRAINING, 25, training.gradients(GPT2)),
    Step("gpt2 PyTorch checkpointed", TRAINING, 20, training.theirs(GPT2, "checkpointed")),
    Step("gpt2 PyTorch memory budget", TRAINING, 50, training.theirs(GPT2, "memory budget")),
    Step("gpt2 PyTorch compiled", TRAINING, 50, training.theirs(GPT2, "compiled")),
    Step("llama PyTorch compiled", TRAINING, 90, training.theirs(LLAMA, "compiled")),
]
