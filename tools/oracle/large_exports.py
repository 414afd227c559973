"""Shows that reading a large file of PyTorch's own formats touches no weights.

    python tools large_exports --ckpt-opt BINARY [--gib 1] [--limit-mb 200]

Saves a stack of linear layers with that many GiB of weights into a temporary folder, as TorchScript (torch.jit.trace) and as
a program (torch.export), and runs `ckpt-opt inspect` on each. Prints the size of the file and the peak resident set of the
process (ru_maxrss; pages of a mapped file count once they are touched). Exit code 1 if a peak exceeds the limit, or if
parameters are missing from the list.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

from tools.lib import options

WIDTH = 4096


def layers_of(gib: float) -> int:
    return max(1, round(gib * 2**30 / (WIDTH * WIDTH * 4)))


def save(path: Path, gib: float) -> None:
    """Writes the model."""
    import torch

    layers = layers_of(gib)
    with torch.no_grad():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    example = torch.zeros(2, WIDTH)
    if path.suffix == ".pt":
        torch.jit.save(torch.jit.trace(model, example), path)
    else:
        rows = {0: torch.export.Dim.DYNAMIC}
        torch.export.save(torch.export.export(model, (example,), dynamic_shapes=(rows,)), path)


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--limit-mb", type=float, default=200.0)
    args = parser.parse_args()
    return max(check(name, args.ckpt_opt, args.gib, args.limit_mb) for name in ("large.pt", "large.pt2"))


def check(name: str, binary: Path, gib: float, limit_mb: float) -> int:
    """Returns 0 if the file of that name is read without touching its weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        # In a process of its own: a child counts the pages of its parent until it begins.
        maker = multiprocessing.get_context("spawn").Process(target=save, args=(path, gib))
        maker.start()
        maker.join()
        command: list[str | Path] = [binary, "inspect", path, "--format", "json"]
        if path.suffix == ".pt":
            command += ["--input", f"input:f32[batch,{WIDTH}]"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        size_mb = path.stat().st_size / 1e6
    layers, peak_mb = layers_of(gib), usage.ru_maxrss * 1024 / 1e6
    listed = len(json.loads(text)["parameters"]) if status == 0 else 0
    code = os.waitstatus_to_exitcode(status)
    print(f"{name}: {size_mb:.0f} MB, peak resident set {peak_mb:.1f} MB, {listed} of {layers} parameters, exit {code}")
    return 0 if listed == layers and peak_mb < limit_mb else 1
