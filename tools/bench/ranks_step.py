"""Compares data-parallel training steps with PyTorch's DDP: the same model, data, threads and optimizer (SGD), in turns.

    python tools ranks_step --ckpt-opt BINARY [--model llama_small] [--ranks 2] [--batch 2] [--seq 128] [--rounds 5] [--steps 8]
        [--bucket 25MiB]

The model has random weights and is exported. Each round runs `--steps` steps of every variant on Gloo over loopback, one thread
per rank: ours with `--bucket`, ours with `--bucket 0` (no overlap), and DistributedDataParallel with buckets of the same size.
The first two steps of a run are left out, and a run counts with its median step. Printed are medians over the rounds,
and ratios within rounds: the median, the least and the largest.

Exit code 1 if a measured peak differs from the predicted one. Needs tools/requirements-torch.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from tools.lib import options
from tools.lib.models import build, export

LR = 1e-3
BUCKET_MIB = 25
OVERLAP, AT_ONCE, DDP = "ours", "ours, --bucket 0", "PyTorch DDP"


def ddp(folder: Path, name: str, batch: int, steps: int) -> None:
    """One rank of PyTorch's: writes the seconds of each step."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(
        build(name, torch.float32), bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    tokens = np.load(folder / "tokens.npy")
    seconds = []
    for step in range(steps):
        begun = time.monotonic()
        first = (step * ranks + rank) * batch % (len(tokens) - batch)
        ids = torch.from_numpy(tokens[first : first + batch])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.monotonic() - begun)
    if rank == 0:
        (folder / "ddp.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def theirs(folder: Path, asked: argparse.Namespace) -> list[float]:
    """Returns the seconds of PyTorch's steps."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.ranks),
        "-m", "tools", "ranks_step", "--ckpt-opt", str(asked.ckpt_opt), "--model", asked.model, "--batch", str(asked.batch),
        "--steps", str(asked.steps), "--rank-in", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=options.ROOT, env=environment, stdout=subprocess.DEVNULL)
    return json.loads((folder / "ddp.json").read_text())


def ours(folder: Path, asked: argparse.Namespace, bucket: str, out: str) -> tuple[list[float], bool]:
    """Returns the seconds of our steps, and whether each rank took the memory that was predicted."""
    command = [
        str(asked.ckpt_opt), "train", "model.onnx", "--loss", "causal-lm", "--data", "data.safetensors", "--dim",
        f"batch={asked.batch}", "--dim", f"seq={asked.seq}", "--policy", "none", "--optimizer", "sgd", "--lr", str(LR),
        "--ranks", str(asked.ranks), "--threads", "1", "--steps", str(asked.steps), "--save-every", "100000",
        "--bucket", bucket, "--out", out, "--format", "json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE)
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    ranks = json.loads(done.stdout)["ranks"]
    is_exact = all(rank["peak_bytes"] == rank["predicted_peak_bytes"] for rank in ranks)
    return [json.loads(line)["seconds"] for line in lines], is_exact


def main() -> int:
    parser = options.with_binary(__doc__)
    options.add_counts(parser, ranks=2, batch=2, seq=128, rounds=5, steps=8)
    parser.add_argument("--model", default="llama_small")
    parser.add_argument("--bucket", default=f"{BUCKET_MIB}MiB")
    parser.add_argument("--rank-in", type=Path, help="play one of PyTorch's ranks in a folder")
    asked = parser.parse_args()
    if asked.rank_in:
        ddp(asked.rank_in, asked.model, asked.batch, asked.steps)
        return 0
    from safetensors.numpy import save_file

    is_exact = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(asked.model, torch.float32)
        export(model, folder / "model.onnx")
        count = asked.batch * asked.ranks * asked.steps
        tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, (count, asked.seq), dtype=np.int64)
        np.save(folder / "tokens.npy", tokens)
        save_file({"input_ids": tokens, "labels": tokens}, folder / "data.safetensors")
        times: dict[str, list[float]] = {OVERLAP: [], AT_ONCE: [], DDP: []}
        for round_number in range(asked.rounds):
            for variant, bucket in ((OVERLAP, asked.bucket), (AT_ONCE, "0")):
                seconds, exact = ours(folder, asked, bucket, f"{round_number}-{bucket}")
                times[variant].append(statistics.median(seconds[2:]))
                is_exact &= exact
            times[DDP].append(statistics.median(theirs(folder, asked)[2:]))
            print(", ".join(f"{variant} {of[-1]:.3f} s" for variant, of in times.items()), flush=True)
    print(f"{asked.model}, {asked.ranks} ranks, {asked.batch} × {asked.seq} tokens each, {asked.rounds} rounds")
    for variant, of in times.items():
        print(f"  {variant:18} {1e3 * statistics.median(of):8.1f} ms")
    for other in (AT_ONCE, DDP):
        ratios = [a / b for a, b in zip(times[OVERLAP], times[other], strict=True)]
        print(f"  {OVERLAP} / {other}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print("peaks as predicted on all ranks" if is_exact else "a peak differs from the predicted one")
    return 0 if is_exact else 1
