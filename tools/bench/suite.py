"""Compares plans with PyTorch's partitioners on training graphs of models, at the peaks that those reach.

    python tools suite --ckpt-opt BINARY --results FILE.jsonl [--model llama,timm/resnet,…] [--peer default,mincut:dp:0.5,…]
        [--minutes 10] [--page FILE.md] [--picture FILE.svg]

Models of transformers and timm are built at the sizes of their own configuration, with few layers, and traced with sizes
only. A peer splits the joint graph of forward and backward pass:

  default          saves what the backward pass reads
  mincut           PyTorch's min-cut partitioner as torch.compile calls it
  mincut:SOLVER:B  the same with an activation memory budget B, between 0 and 1, and a solver: dp, greedy or ilp

One judge computes the peak and the added floating-point operations of each schedule: `peak_of` of the Python package, which
the package's tests compare with measured peaks. At the peak that a peer reaches, we plan for the least added operations. A row
fails if ours has more. Rows in the results file are not made again. Each model runs in a process of its own for at most
`--minutes`. PyTorch is needed (tools/requirements-torch.txt). Exit code 0 if no row fails, else 1.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.lib import options, page, zoo
from tools.lib.model_inputs import Maker, Sizes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/python"))

from ckpt_opt.joint import Joint
from ckpt_opt.planner import BudgetError, peak_of, solve, static_bytes
from ckpt_opt.prices import Prices

TRANSFORMERS = (
    "llama,qwen3,mistral,gemma3_text,gemma2,phi3,gpt2,gpt_neox,opt,bloom,falcon,olmo2,starcoder2,granite,cohere2,qwen3_moe,mixtral,"
    "mamba,falcon_mamba,zamba2,rwkv,bert,roberta,deberta-v2,electra,modernbert,t5,bart,pegasus,whisper,wav2vec2,hubert,vit,"
    "dinov2,swin,convnext,detr,segformer,mask2former,sam,clip,siglip,blip-2"
)
TIMM = "timm/resnet,timm/efficientnet,timm/convnext,timm/swin_transformer,timm/vision_transformer,timm/densenet,timm/regnet"
PEERS = "default,mincut," + ",".join(f"mincut:{s}:{b}" for s in ("dp", "greedy", "ilp") for b in (0.75, 0.5, 0.25, 0.1))
LAYERS = 4
SIZES = Sizes(4, 512)
SHORT = Sizes(4, 64)
"""Where positions end before."""
ROUNDING_PCT = 1e-6
Row = dict[str, Any]


def built(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a model without data at the sizes of its configuration, with `LAYERS` layers, and inputs for it."""
    (architecture,) = [a for a in zoo.architectures(["transformers", "timm"]) if a.name == name]
    with torch.device("meta"):
        model = real_timm(architecture.maker) if architecture.family == "timm" else real_transformers(architecture)
    model.eval()
    if architecture.family == "timm":
        return model, {"x": torch.empty(SIZES.batch, *model.default_cfg["input_size"], device="meta")}
    for sizes in (SIZES, SHORT):
        for made in Maker(model, sizes, architecture.group).candidates():
            # Masks are looked into, and here is no data.
            inputs = {key: value.to("meta") for key, value in made.items() if "mask" not in key}
            with contextlib.suppress(Exception), as_compiled():
                loss_of(model(**inputs))
                return model, inputs
    raise zoo.Unbuilt(f"{name}: no inputs fit")


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Runs models as torch.compile does, so that they do not look into their data."""
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        yield


def real_timm(module: str) -> torch.nn.Module:
    import timm

    return timm.create_model(timm.list_models(module=module)[0])


def real_transformers(architecture: zoo.Architecture) -> torch.nn.Module:
    import transformers

    kind = getattr(transformers, architecture.maker)
    config = kind.config_class()
    zoo.without_cache(config)
    for name in (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(LAYERS, getattr(config, name)))
    return kind(config)


def loss_of(result: Any) -> torch.Tensor:
    """Returns a scalar that depends on every floating-point tensor in a result."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return torch.stack([t.float().mean() for t in tensors if t.is_floating_point() and t.requires_grad]).sum()


class WithLoss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(**inputs))


def partitions(peer: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns PyTorch's partitioner of that name, and the options that it is called under."""
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    kind, *more = peer.split(":")
    if kind == "default":
        return default_partition, {}
    if not more:
        return min_cut_rematerialization_partition, {}
    solver, budget = more
    settings = {"activation_memory_budget": float(budget), "activation_memory_budget_solver": solver}
    return min_cut_rematerialization_partition, settings


def compared(name: str, peers: list[str]) -> Iterator[Row]:
    """Yields a row for each peer."""
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._functorch.partitioners import fx_graph_cse

    model, inputs = built(name)
    with ExitStack() as stack:
        with as_compiled():
            traced = aot_export_joint_with_descriptors(stack, WithLoss(model), (), inputs)
        module = traced.graph_module
        module.graph.eliminate_dead_code()
        module.graph = fx_graph_cse(module.graph)
        module.recompile()
        outputs = 1
        joint = Joint(module, outputs)
        graph = joint.cost_graph(Prices(measure=False, fused=False))
        places = {op.node.name: i for i, op in enumerate(joint.ops)}
        once = sum(op["flops"] for op in graph["ops"])
        ours: dict[int, Row] = {}
        for peer in peers:
            partition, settings = partitions(peer)
            start = time.process_time()
            try:
                with config.patch(settings):
                    halves = partition(copy.deepcopy(module), None, num_fwd_outputs=outputs)
            except Exception as error:
                yield {"model": name, "peer": peer, "failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
                continue
            seconds = time.process_time() - start
            # What is handed over is an input of the same name.
            nodes = [node for half in halves for node in half.graph.nodes if node.op != "placeholder"]
            schedule = [places[node.name] for node in nodes if node.name in places]
            peak = peak_of(graph, schedule)
            added = 100 * (sum(graph["ops"][op]["flops"] for op in schedule) / max(once, 1) - 1)
            if peak not in ours:
                ours[peak] = own_plan(graph, peak)
            yield {
                "model": name,
                "ops": len(joint.ops),
                "peer": peer,
                "peak": peak,
                "unplanned": peak_of(graph, list(range(len(joint.ops)))),
                "static": static_bytes(graph),
                "flops_pct": added,
                "seconds": round(seconds, 2),
                "repeated": sum(Counter(schedule).values()) - len(set(schedule)),
                **ours[peak],
            }


def own_plan(graph: dict[str, Any], peak: int) -> Row:
    """Plans within a peak for the least added operations."""
    start = time.monotonic()
    try:
        decisions, report = solve(graph, peak, "flops", "normal")
    except BudgetError as error:
        return {"ours_failed": str(error).split("\n")[0]}
    return {
        "ours_peak": peak_of(graph, decisions["schedule"]),
        "ours_flops_pct": report["flops_overhead_pct"],
        "ours_bound_pct": report["lower_bound_pct"],
        "ours_seconds": round(time.monotonic() - start, 2),
    }


def work(name: str, peers: list[str], results: Path) -> None:
    """Appends the rows of a model to the results; a model that cannot be traced is one row."""
    try:
        for row in compared(name, peers):
            append(results, row)
    except Exception as error:
        append(results, {"model": name, "peer": "", "failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]})


def append(results: Path, row: Row) -> None:
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def wrong(row: Row) -> str:
    """Returns what is wrong with a row, if anything is."""
    if "failed" in row:
        return ""
    if "ours_failed" in row:
        return str(row["ours_failed"])
    if row["ours_peak"] > row["peak"]:
        return f"the plan's peak is {row['ours_peak']} bytes"
    if row["ours_flops_pct"] > row["flops_pct"] + ROUNDING_PCT:
        return f"{row['ours_flops_pct']:.3f} % are added, the peer adds {row['flops_pct']:.3f} %"
    return ""


def table(rows: list[Row]) -> list[str]:
    """Returns a line for each peer, over all models."""
    lines = [
        "| peer | graphs | ours is no worse | ours is better | added FLOPs, % (median: peer, ours) | gap to the bound ≤ 1 point | seconds (median: peer, ours) |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for peer in dict.fromkeys(row["peer"] for row in rows if "peak" in row):
        own = [row for row in rows if row["peer"] == peer and "peak" in row]
        planned = [row for row in own if "ours_peak" in row]
        good = sum(not wrong(row) for row in own)
        better = sum(row["ours_flops_pct"] < row["flops_pct"] - ROUNDING_PCT for row in planned)
        close = sum(row["ours_flops_pct"] - row["ours_bound_pct"] <= 1 for row in planned)
        flops = (
            [statistics.median(row[k] for row in planned) for k in ("flops_pct", "ours_flops_pct")]
            if planned
            else [0, 0]
        )
        took = (
            [statistics.median(row[k] for row in planned) for k in ("seconds", "ours_seconds")] if planned else [0, 0]
        )
        lines.append(
            f"| {peer} | {len(own)} | {good} | {better} | {flops[0]:.1f}, {flops[1]:.1f} | {close} | {took[0]:.1f}, {took[1]:.1f} |"
        )
    return lines


SIDE, EDGE = 420, 50
COLORS = {"dp": "#0072b2", "greedy": "#d55e00", "ilp": "#009e73", "": "#555555"}


def picture(rows: list[Row]) -> str:
    """Returns a scatter plot: for each graph and peer, the FLOPs that the peer adds, and those that we add at its peak."""
    planned = [row for row in rows if "ours_peak" in row]
    most = max(max(row["flops_pct"], row["ours_flops_pct"]) for row in planned)

    def at(percent: float) -> float:
        """Square roots keep small percentages apart."""
        return (max(percent, 0) / most) ** 0.5 * SIDE

    bottom = EDGE + SIDE
    marks = [tick for tick in (0, 1, 5, 10, 20, 50, 100, 200) if tick <= most]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE + 2 * EDGE} {SIDE + 2 * EDGE}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{SIDE + 2 * EDGE}" height="{SIDE + 2 * EDGE}" fill="white"/>',
        f'<path d="M{EDGE},{EDGE}V{bottom}H{EDGE + SIDE}M{EDGE},{bottom}L{EDGE + SIDE},{EDGE}" fill="none" stroke="#999"/>',
    ]
    for tick in marks:
        lines.append(f'<text x="{EDGE + at(tick):.0f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
        lines.append(f'<text x="{EDGE - 6}" y="{bottom - at(tick) + 4:.0f}" text-anchor="end">{tick}</text>')
    for row in planned:
        solver = row["peer"].split(":")[1] if ":" in row["peer"] else ""
        x, y = EDGE + at(row["flops_pct"]), bottom - at(row["ours_flops_pct"])
        name = f"{row['model']}, {row['peer']}: {row['flops_pct']:.2f} %, ours {row['ours_flops_pct']:.2f} %"
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS[solver]}" fill-opacity="0.6"><title>{name}</title></circle>'
        )
    lines.append(
        f'<text x="{EDGE + SIDE / 2}" y="{bottom + 36}" text-anchor="middle">FLOPs that the peer adds, %</text>'
    )
    lines.append(
        f'<text x="14" y="{EDGE + SIDE / 2}" text-anchor="middle" transform="rotate(-90 14 {EDGE + SIDE / 2})">'
        "ours at the same peak, %</text>"
    )
    for i, (solver, color) in enumerate(COLORS.items()):
        y = EDGE + 6 + 18 * i
        lines.append(f'<circle cx="{EDGE + 16}" cy="{y}" r="4" fill="{color}"/>')
        lines.append(
            f'<text x="{EDGE + 26}" y="{y + 4}">{f"min-cut, {solver}" if solver else "default, min-cut"}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    arguments = options.with_binary(__doc__)
    arguments.add_argument("--results", type=Path, required=True, metavar="FILE.jsonl", help="keep rows here")
    arguments.add_argument("--model", type=options.words, default=options.words(f"{TRANSFORMERS},{TIMM}"), help="names")
    arguments.add_argument("--peer", type=options.words, default=options.words(PEERS), help=f"[default: {PEERS}]")
    options.add_counts(arguments, minutes=10)
    options.add_page(arguments)
    arguments.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the rows")
    given = arguments.parse_args()
    os.environ["CKPT_OPT_BIN"] = str(given.ckpt_opt)

    def read() -> list[Row]:
        return [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []

    done = {row["model"] for row in read()}
    spawn = multiprocessing.get_context("spawn")
    for name in given.model:
        if name in done:
            continue
        process = spawn.Process(target=work, args=(name, given.peer, given.results))
        process.start()
        process.join(60 * given.minutes)
        if process.is_alive():
            process.kill()
            process.join()
            append(given.results, {"model": name, "peer": "", "failed": f"more than {given.minutes} minutes"})
        print(f"{name}: {sum(row['model'] == name for row in read())} rows", file=sys.stderr, flush=True)
    rows = [row for row in read() if row["model"] in given.model]
    lines = table(rows)
    print("\n".join(lines))
    if given.picture:
        given.picture.write_text(picture(rows))
    # The peers of a model fail alike.
    notes = list(dict.fromkeys(f"{row['model']}: {row['failed']}" for row in rows if "failed" in row))
    failures = [f"{row['model']} {row['peer']}: {text}" for row in rows if (text := wrong(row))]
    graphs = len({row["model"] for row in rows if "ours_peak" in row})
    head = page.head(
        f"{graphs} models, PyTorch {torch.__version__}, batch {SIZES.batch}, {SIZES.seq} tokens, {LAYERS} layers", 1
    )
    drawn = []
    if given.picture:
        drawn = [f"![FLOPs that peers add, and ours at the same peaks](pictures/{given.picture.name})", ""]
    lines = [head, "", *drawn, *lines]
    return page.finish("Plans and PyTorch's partitioners", lines, notes, failures, given.page)


if __name__ == "__main__":
    sys.exit(main())
