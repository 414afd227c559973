"""PyTorch's own memory viewer on our snapshots: it reads them, and its totals are the plan's.

    python tools/memory_viz.py CKPT_OPT MODEL… [-- OPTIONS OF ckpt-opt plan]

For every model a plan is made with --report FILE.pickle. torch.cuda._memory_viz must format the snapshot (its `trace`
text and its `trace_plot` page), and the peak of its trace must be the peak that the plan reports. Needs torch.
Exit code 1 where anything differs.
"""

import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from torch.cuda import _memory_viz


def check(tool: str, model: str, options: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pickle"
        command = [tool, "plan", model, "--format", "json", "--report", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return [done.stderr.strip()]
        plan = json.loads(done.stdout)
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


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    (tool, *models), options = words[:at], words[at + 1 :]
    failed = False
    for model in models:
        for line in check(tool, model, options):
            failed = True
            print(f"  {line}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
