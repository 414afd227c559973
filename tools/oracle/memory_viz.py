"""Loads memory snapshots into PyTorch's own memory viewer, and compares its totals with the plan's.

    python tools memory_viz --ckpt-opt BINARY MODEL… [-- OPTIONS OF ckpt-opt plan]

For every model a plan is made with --report FILE.pickle. torch.cuda._memory_viz must format the snapshot (its `trace`
text and its `trace_plot` page), and the peak of its trace must be the peak that the plan reports. Needs torch.
Exit code 1 if anything differs.
"""

import pickle
import sys
import tempfile
from pathlib import Path

from torch.cuda import _memory_viz

from tools.lib import options
from tools.lib.compiler import Compiler, Refused


def check(compiler: Compiler, model: Path, planning: list[str]) -> list[str]:
    """Returns what is wrong with the snapshot of one model's plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pickle"
        try:
            plan = compiler.call_json("plan", model, "--report", path, *planning)
        except Refused as refused:
            return [str(refused)]
        snapshot = pickle.loads(path.read_bytes())
    wrong = []
    text = _memory_viz.trace(snapshot)
    events = snapshot["device_traces"][0]
    if text.count("\n") < len(events):
        wrong.append(f"trace has {text.count(chr(10))} lines for {len(events)} events")
    page = _memory_viz.trace_plot(snapshot)
    if "add_local_files" not in page:
        wrong.append("trace_plot made no page")
    live = peak = 0
    for event in events:
        live += event["size"] if event["action"] == "alloc" else -event["size"]
        peak = max(peak, live)
    total = sum(segment["allocated_size"] for segment in snapshot["segments"])
    for name, found in (("trace", peak), ("segments", total)):
        if found != plan["peak_after_bytes"]:
            wrong.append(f"{name}: {found} bytes, the plan has {plan['peak_after_bytes']}")
    print(f"{model}: {len(events)} events, peak {peak} bytes, " + ("FAILED" if wrong else "as planned"))
    return wrong


def main() -> int:
    arguments, planning = options.split_at_dashes()
    parser = options.with_binary(__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    args = parser.parse_args(arguments)
    compiler = Compiler(args.ckpt_opt)
    wrong = [line for model in args.models for line in check(compiler, model, planning or [])]
    for line in wrong:
        print(f"  {line}", file=sys.stderr)
    return 1 if wrong else 0
