"""Measures what ONNX Runtime does to recompute nodes: how many its optimiser leaves, and how much memory a step takes.

    python tools ort_copies UNPLANNED PLANNED [--dim NAME=N …] [--threads N] [--levels …] [--orders …]
        [--without OPTIMISER,…]

Both files are training graphs of one model, written by ckpt-opt with --policy none and with the plan in question. Each is
loaded once for every optimisation level and execution order, in its own process, and run on the same inputs. The columns:
nodes after the optimiser (which inlines functions, so more than the file holds), recompute nodes among them, the memory
that the run adds to the process (ru_maxrss; without ONNX Runtime's arena, which rounds), and the largest distance of any
output to the unplanned file's at the same level. Needs tools/requirements.txt.
"""

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

from tools.lib import options

ORDERS = ["DEFAULT", "PRIORITY_BASED"]
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]
COPY = re.compile(r"/recompute(\.\d+)?(_|/|$)")
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def inputs(session: ort.InferenceSession, dims: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns small integers and normal floats from one seed, so that both files receive the same."""
    rng = np.random.default_rng(0)
    made = {}
    for item in sorted(session.get_inputs(), key=lambda i: i.name):
        shape = [n if isinstance(n, int) else dims.get(n, 1) for n in item.shape]
        dtype = DTYPES[item.type]
        drawn = rng.integers(0, 90, shape) if dtype != np.float32 else rng.standard_normal(shape)
        made[item.name] = np.asarray(drawn).astype(dtype)
    return made


def resident_bytes() -> int:
    """Returns the resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measured(
    path: str, level: str, order: str, without: list[str], dims: dict[str, int], threads: int, outputs: str, answer
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        settings.execution_order = getattr(ort.ExecutionOrder, order)
        settings.enable_cpu_mem_arena = False
        settings.intra_op_num_threads = threads
        settings.optimized_model_filepath = f"{folder}/optimised.onnx"
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"], disabled_optimizers=without)
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
    """Measures in a process of its own, because the peak memory of a process never falls."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("spawn").Process(target=measured, args=(*what, theirs))
    worker.start()
    theirs.close()
    found = json.loads(ours.recv())
    worker.join()
    return found


def largest_distance(unplanned: str, other: str) -> float:
    """Returns the largest distance of any element of the shared outputs. Reads one output at a time, to save memory."""
    with np.load(unplanned) as a, np.load(other) as b:
        shared = sorted(set(a.files) & set(b.files))
        return max(float(np.abs(np.subtract(a[n], b[n], dtype=np.float64)).max(initial=0)) for n in shared)


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("unplanned")
    parser.add_argument("planned")
    parser.add_argument("--dim", action="append", default=[])
    options.add_counts(parser, threads=2)
    parser.add_argument("--levels", type=options.words_of(LEVELS), default=LEVELS)
    parser.add_argument("--orders", type=options.words_of(ORDERS), default=ORDERS[:1], help=", ".join(ORDERS))
    parser.add_argument(
        "--without", type=options.words, default=[], help="optimisers to leave out: CommonSubexpressionElimination,…"
    )
    args = parser.parse_args()
    dims = options.parse_dims(args.dim)
    print("| level | order | file | nodes | copies | taken by the run | largest distance |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for level, order in itertools.product(args.levels, args.orders):
            for name, path in (("unplanned", args.unplanned), ("planned", args.planned)):
                found = apart(path, level, order, args.without, dims, args.threads, f"{folder}/{name}.npz")
                distance = largest_distance(f"{folder}/unplanned.npz", f"{folder}/{name}.npz")
                print(
                    f"| {level} | {order} | {name} | {found['nodes']} | {found['copies']} "
                    f"| {found['bytes'] / 2**20:.0f} MiB | {distance:.1e} |",
                    flush=True,
                )
    return 0
