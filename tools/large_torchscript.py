#!/usr/bin/env python3
"""Show that reading a large TorchScript file touches no weights.

    python tools/large_torchscript.py --ckpt-opt target/release/ckpt-opt [--gib 1] [--limit-mb 200]

Traces a stack of linear layers whose weights take that many GiB, saves it with torch.jit.save into a temporary folder,
and runs `ckpt-opt inspect` on it. Prints the size of the file and the peak resident set of the process (ru_maxrss; pages
of a mapped file count once they are touched). Exit 1 if the peak is above the limit or the parameters are not all listed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH = 4096


def layers_of(gib: float) -> int:
    return max(1, round(gib * 2**30 / (WIDTH * WIDTH * 4)))


def save(path: Path, gib: float) -> None:
    """Writes the model."""
    import torch

    layers = layers_of(gib)
    with torch.no_grad():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    torch.jit.save(torch.jit.trace(model, torch.zeros(1, WIDTH)), path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt-opt", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--limit-mb", type=float, default=200.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.pt"
        # In a process of its own: a child counts the pages of its parent until it begins.
        maker = multiprocessing.get_context("spawn").Process(target=save, args=(path, args.gib))
        maker.start()
        maker.join()
        layers = layers_of(args.gib)
        command = [args.ckpt_opt, "inspect", path, "--input", f"input:f32[batch,{WIDTH}]", "--format", "json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        size_mb = path.stat().st_size / 1e6
    peak_mb = usage.ru_maxrss * 1024 / 1e6
    listed = len(json.loads(text)["parameters"]) if status == 0 else 0
    print(f"file {size_mb:.0f} MB, peak resident set {peak_mb:.1f} MB, {listed} of {layers} parameters, exit {os.waitstatus_to_exitcode(status)}")
    return 0 if listed == layers and peak_mb < args.limit_mb else 1


if __name__ == "__main__":
    sys.exit(main())
