"""What ONNX Runtime does to recompute nodes: how many its optimiser leaves, and the memory that a step then takes.

    python tools/ort_copies.py UNPLANNED PLANNED [--dim NAME=N …] [--threads N] [--levels …] [--orders …]
        [--without OPTIMISER,…]

Both files are training graphs of one model, written by ckpt-opt with --policy none and with the plan in question. Each is loaded
once for every optimisation level and execution order, in a process of its own, and run on the same inputs. Columns: nodes after the
optimiser (functions are inlined, so there are more than in the file), nodes of recomputation among them, the most
memory that the process took above what it had before the run (ru_maxrss; without ONNX Runtime's arena, which rounds),
and the largest distance of any output to the unplanned file's at the same level. Needs tools/requirements.txt.
"""

import argparse
import itertools
import json
import multiprocessing
import re
import resource
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

ORDERS = ["DEFAULT", "PRIORITY_BASED"]
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]
COPY = re.compile(r"/recompute(\.\d+)?(_|/|$)")
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def inputs(session: ort.InferenceSession, dims: dict[str, int]) -> dict[str, np.ndarray]:
    """Small integers and normal floats from one seed, so that both files see the same."""
    rng = np.random.default_rng(0)
    made = {}
    for item in sorted(session.get_inputs(), key=lambda i: i.name):
        shape = [n if isinstance(n, int) else dims.get(n, 1) for n in item.shape]
        dtype = DTYPES[item.type]
        drawn = rng.integers(0, 90, shape) if dtype != np.float32 else rng.standard_normal(shape)
        made[item.name] = np.asarray(drawn).astype(dtype)
    return made


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text).group(1)) * 1024


def measured(
    path: str, level: str, order: str, without: list[str], dims: dict[str, int], threads: int, outputs: str, answer
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.execution_order = getattr(ort.ExecutionOrder, order)
        options.enable_cpu_mem_arena = False
        options.intra_op_num_threads = threads
        options.optimized_model_filepath = f"{folder}/optimised.onnx"
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        session = ort.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], disabled_optimizers=without
        )
        graph = onnx.load(f"{folder}/optimised.onnx", load_external_data=False).graph
    feeds = inputs(session, dims)
    names = sorted(o.name for o in session.get_outputs())
    before = resident_bytes()
    found = session.run(names, feeds)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    copies = sum(bool(COPY.search(n.name)) for n in graph.node)
    np.savez(outputs, **dict(zip(names, found)))
    answer.send(json.dumps({"nodes": len(graph.node), "copies": copies, "bytes": taken}))


def apart(*what) -> dict:
    """In a process of its own: the most memory a process took never falls."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("spawn").Process(target=measured, args=(*what, theirs))
    worker.start()
    theirs.close()
    found = json.loads(ours.recv())
    worker.join()
    return found


def largest_distance(unplanned: str, other: str) -> float:
    """Of any element of any output that both have; one output at a time, for those of a large model are large."""
    with np.load(unplanned) as a, np.load(other) as b:
        shared = sorted(set(a.files) & set(b.files))
        return max(float(np.abs(np.subtract(a[n], b[n], dtype=np.float64)).max(initial=0)) for n in shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unplanned")
    parser.add_argument("planned")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--orders", default=ORDERS[0], help=", ".join(ORDERS))
    parser.add_argument("--without", default="", help="optimisers to leave out: CommonSubexpressionElimination,…")
    args = parser.parse_args()
    without = [name for name in args.without.split(",") if name]
    dims = {name: int(size) for name, size in (d.split("=") for d in args.dim)}
    print("| level | order | file | nodes | copies | taken by the run | largest distance |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for level, order in itertools.product(args.levels.split(","), args.orders.split(",")):
            for name, path in (("unplanned", args.unplanned), ("planned", args.planned)):
                found = apart(path, level, order, without, dims, args.threads, f"{folder}/{name}.npz")
                distance = largest_distance(f"{folder}/unplanned.npz", f"{folder}/{name}.npz")
                print(
                    f"| {level} | {order} | {name} | {found['nodes']} | {found['copies']} "
                    f"| {found['bytes'] / 2**20:.0f} MiB | {distance:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
