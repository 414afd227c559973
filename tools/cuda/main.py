"""Checks and measures the CUDA runtime on a machine with an NVIDIA device, in one run of at most nine minutes.

    tools/cuda-checks --pack DIR      here: pack a kit of the release binary, models without weights and solved plans
    DIR/tools/cuda-checks --out OUT   there: run it; results.jsonl, evidence.md and log.txt appear in OUT
    tools/cuda-checks --dry-run       pack fixtures as models, and run that kit on the CPU
    tools/cuda-checks --list          list the steps and their time limits in seconds

The kit needs no Rust, no network and no file outside its folder. It needs Python 3.11 or later with numpy and torch 2.11,
whose libraries the binary uses; steps that run PyTorch also need transformers and onnx. To pack, it also needs PyTorch
(tools/requirements-torch.txt), except for a dry run. Weights are made from a seed where the kit runs.

Every step is a process with a time limit. What it finds is written to results.jsonl at once, so that nothing is lost when a
step, or the whole run, is stopped. A step that fails or runs out of time hides no other one. When time runs out, the last
steps are dropped, and the page says so.

Exit codes: 0 every condition holds and every step ended well, 2 usage, 4 something differs, failed or was dropped. A dry run
may skip the steps for which this Python lacks PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tools.cuda import records, runner
from tools.cuda.context import Context, Skipped
from tools.cuda.runner import Runner
from tools.cuda.steps import STEPS
from tools.lib import options
from tools.lib.options import ROOT, folder_or_scratch

MOST_S = 540.0
DISAGREES = 4


def fail(message: str) -> int:
    print(f"cuda-checks: {message}", file=sys.stderr)
    return 2


def built_binary() -> Path | None:
    """Returns the newest binary that cargo has built."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    found = [path for path in target.glob("*/ckpt-opt") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="pack the kit into a new folder")
    parser.add_argument("--dry-run", action="store_true", help="pack a small kit and run it on the CPU")
    parser.add_argument(
        "--binary", type=options.binary, help="the binary to pack [default: the newest that cargo built]"
    )
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument(
        "--work", type=Path, help="folder for weights and gradients, about 10 GB [default: a temporary one]"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu [default: cuda]")
    parser.add_argument("--limit", type=float, default=MOST_S, metavar="SECONDS", help="end by then [default: 540]")
    parser.add_argument(
        "--steps", type=options.words_of([s.name for s in STEPS]), help="only these, separated by commas"
    )
    parser.add_argument("--step", help="run one step in this process; the kit calls itself so")
    arguments = parser.parse_args()
    steps = [step for step in STEPS if arguments.steps is None or step.name in arguments.steps]
    if arguments.list:
        for step in steps:
            print(f"{step.limit_s:4}  {step.stage:12} {step.name}")
        return 0
    if arguments.pack or arguments.dry_run:
        binary = arguments.binary or built_binary()
        if binary is None:
            return fail(
                "there is no binary; build one with `cargo build --release --features torch`, or name it: --binary"
            )
        # Only here: a kit does not pack kits.
        from tools.cuda import pack

        if arguments.pack:
            pack.pack(binary, arguments.pack, small=False)
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            kit = (arguments.work or Path(scratch)) / "kit"
            pack.pack(binary, kit, small=True)
            words = [arg for arg in sys.argv[1:] if arg != "--dry-run"]
            out = [] if arguments.out else ["--out", str(Path(scratch) / "out")]
            command = [sys.executable, str(kit / "tools" / "cuda-checks"), *words, *out, "--device", "cpu"]
            return subprocess.run(command).returncode
    if not (ROOT / "kit.json").exists():
        return fail(f"{ROOT} is no kit; pack one with --pack DIR, or try it on the CPU with --dry-run")
    if arguments.out is None:
        return fail("where do results go? Name a folder: --out DIR")
    if arguments.step:
        return one_step(Context(ROOT, arguments.out, arguments.work, arguments.device, arguments.step))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with folder_or_scratch(arguments.work) as work:
        return run(steps, arguments.out.resolve(), work.resolve(), arguments.device, arguments.limit)


def run(steps: list[runner.Step], out: Path, work: Path, device: str, limit_s: float) -> int:
    """Runs steps, and prints and writes what they found."""
    dry = device == "cpu"
    binary = ROOT / "bin" / "ckpt-opt"
    if not os.access(binary, os.X_OK):
        # The kit was carried by something that keeps no modes.
        binary.chmod(0o755)
    command = [sys.executable, "-u", str(ROOT / "tools" / "cuda-checks")]
    command += ["--out", str(out), "--work", str(work), "--device", device, "--step"]
    Runner(command, out, dry, limit_s).run(steps)
    found = records.read(out)
    print("\n".join(["", *records.summary(found), f"see {out / records.PAGE}"]))
    return 0 if records.agrees(found, dry) else DISAGREES


def one_step(cx: Context) -> int:
    runner.end_with_parent()
    step = next(step for step in STEPS if step.name == cx.step)
    try:
        step.run(cx)
    except Skipped as skipped:
        print(skipped)
        return runner.SKIP_CODE
    except Exception as error:
        traceback.print_exc()
        # The last line is what a summary shows.
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
