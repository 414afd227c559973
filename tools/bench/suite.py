"""Compares plans with PyTorch's partitioners on training graphs of models, at the peaks that those reach.

    python tools suite --ckpt-opt BINARY --results FILE.jsonl [--model llama,timm/resnet,…] [--peer default,mincut:dp:0.5,…]
        [--layers 4] [--graphs DIR] [--replan] [--minutes 10] [--page FILE.md] [--picture FILE.svg]

Models of transformers, timm and diffusers are built at the sizes of their own configuration, with few layers, and traced with
sizes only. A peer splits the joint graph of forward and backward pass:

  default          saves what the backward pass reads
  mincut           PyTorch's min-cut partitioner as torch.compile calls it
  mincut:SOLVER:B  the same with an activation memory budget B, between 0 and 1, and a solver: dp, greedy or ilp
  layers           activation checkpointing: recomputes every layer that the model's library would checkpoint, as torch.compile
                   does after gradient_checkpointing_enable() of transformers, set_grad_checkpointing() of timm and
                   enable_gradient_checkpointing() of diffusers
  selective        selective activation checkpointing: the same, but saves results of matrix products, convolutions and attention
  package:BUDGET   the partitioner of the Python package with a budget, as 50%; its seconds are those of the whole partition

One judge computes the peak and the added floating-point operations of each schedule: `peak_of` of the Python package, which
the package's tests compare with measured peaks. At the peak that a peer reaches, we plan for the least added operations. A row
fails if ours has more. Further rows plan within multiples of the smallest peak above parameters and inputs that we reach.

Peers count operations by the formulas that we use (`ckpt_opt.prices`), which correct PyTorch's. Seconds are CPU time. A peer's
are those of its partitioner, which also writes both passes (all that `default` does). Ours are those of reading the joint
graph, and of the command: JSON in both directions, its start, the plan and its bound.

A row that is in the results file is not made again, so a run with more peers adds only their rows. `--graphs` keeps cost graphs,
and `--replan` plans all rows again from these, without models and peers. Each model runs in a process of its own for at most
`--minutes`. PyTorch is needed (tools/requirements-torch.txt). Exit code 0 if no row fails, else 1.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import itertools
import json
import multiprocessing
import operator
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.lib import options, page, results, zoo
from tools.lib.model_inputs import Maker, Sizes
from tools.lib.results import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/python"))

import ckpt_opt
from ckpt_opt.joint import Joint
from ckpt_opt.planner import BudgetError, peak_of, solve, static_bytes
from ckpt_opt.prices import FORMULAS, Prices

TRANSFORMERS = (
    "llama,qwen3,mistral,gemma3_text,gemma2,phi3,gpt2,gpt_neox,opt,bloom,falcon,olmo2,starcoder2,granite,cohere2,qwen3_moe,mixtral,"
    "mamba,falcon_mamba,zamba2,rwkv,bert,roberta,deberta-v2,electra,modernbert,t5,bart,pegasus,whisper,wav2vec2,hubert,vit,"
    "dinov2,swin,convnext,detr,segformer,mask2former,sam,clip,siglip,blip-2"
)
TIMM = "timm/resnet,timm/efficientnet,timm/convnext,timm/swin_transformer,timm/vision_transformer,timm/densenet,timm/regnet"
DIFFUSERS = "diffusers/unet,diffusers/autoencoder,diffusers/dit,diffusers/sd3,diffusers/flux,diffusers/pixart"
MODELS = f"{TRANSFORMERS},{TIMM},{DIFFUSERS}"
CHECKPOINTING = ("layers", "selective")
PEERS = ",".join(
    ["default", "mincut"]
    + [f"mincut:{s}:{b}" for s in ("dp", "greedy", "ilp") for b in (0.75, 0.5, 0.25, 0.1)]
    + list(CHECKPOINTING)
)
LAYERS = 4
SIZES = Sizes(4, 512)
SHORT = Sizes(4, 64)
"""Where positions end before."""
ROUNDING_PCT = 1e-6
MULTIPLES = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)
"""Of the smallest peak above what is static: budgets without a peer."""
OURS = "ours"
ABOUT = ("model", "ops", "unplanned", "static", "graph_seconds")
"""What the rows of a graph share."""


def built(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a model without data at the sizes of its configuration, with `LAYERS` layers, and inputs for it."""
    if name.startswith("diffusers/"):
        with torch.device("meta"):
            model, inputs = real_diffusers(name.removeprefix("diffusers/"))
        return model.eval(), inputs
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


def real_diffusers(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Returns a model at the sizes of Stable Diffusion, DiT, Stable Diffusion 3, Flux or PixArt, and inputs for it."""
    import diffusers

    batch = SIZES.batch
    times = {"timestep": torch.zeros(batch)}
    if name == "unet":
        unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        return unet, times | {
            "sample": torch.empty(batch, 4, 64, 64),
            "encoder_hidden_states": torch.empty(batch, 77, 768),
        }
    if name == "autoencoder":
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        coder = diffusers.AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **kinds)
        return coder, {"sample": torch.empty(batch, 3, 256, 256)}
    if name == "dit":
        labels = torch.zeros(batch, dtype=torch.long)
        noise = {"hidden_states": torch.empty(batch, 4, 32, 32)}
        return diffusers.DiTTransformer2DModel(num_layers=LAYERS), times | noise | {"class_labels": labels}
    if name == "sd3":
        return diffusers.SD3Transformer2DModel(num_layers=LAYERS), times | {
            "hidden_states": torch.empty(batch, 16, 128, 128),
            "encoder_hidden_states": torch.empty(batch, 154, 4096),
            "pooled_projections": torch.empty(batch, 2048),
        }
    if name == "flux":
        return diffusers.FluxTransformer2DModel(num_layers=LAYERS // 2, num_single_layers=LAYERS // 2), times | {
            "hidden_states": torch.empty(batch, 1024, 64),
            "encoder_hidden_states": torch.empty(batch, 512, 4096),
            "pooled_projections": torch.empty(batch, 768),
            "img_ids": torch.empty(1024, 3),
            "txt_ids": torch.empty(512, 3),
        }
    if name == "pixart":
        model = diffusers.PixArtTransformer2DModel(num_layers=LAYERS, sample_size=64, caption_channels=4096)
        return model, times | {
            "hidden_states": torch.empty(batch, 4, 64, 64),
            "encoder_hidden_states": torch.empty(batch, 120, 4096),
        }
    raise zoo.Unbuilt(name)


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
    """Returns the partitioner of that name, and PyTorch's options that it is called under."""
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    kind, *more = peer.split(":")
    if kind == "default":
        return default_partition, {}
    if kind == "package":
        return ckpt_opt.partitioner(budget=more[0], objective="flops"), {}
    if not more:
        return min_cut_rematerialization_partition, {}
    solver, budget = more
    settings = {"activation_memory_budget": float(budget), "activation_memory_budget_solver": solver}
    return min_cut_rematerialization_partition, settings


def corrected() -> Any:
    """Lets PyTorch count operations by our formulas where its own are missing or wrong."""
    from torch.utils.flop_counter import flop_registry

    known = {}
    for name, formula in FORMULAS.items():
        namespace, op = name.split(".")
        if (packet := getattr(getattr(torch.ops, namespace), op, None)) is not None:
            known[packet] = formula
    return mock.patch.dict(flop_registry, known)


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def joint_of(model: torch.nn.Module, inputs: dict[str, Any], stack: ExitStack) -> torch.fx.GraphModule:
    """Returns the joint graph of forward and backward pass, from which partitioners start."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._functorch.partitioners import fx_graph_cse

    # `numbered_layers` first: it imports modules of transformers, which register their outputs with pytree only outside of
    # compiled code.
    with numbered_layers(model), as_compiled():
        traced = aot_export_joint_with_descriptors(stack, WithLoss(model), (), inputs)
    module = traced.graph_module
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    module.recompile()
    return module


@contextlib.contextmanager
def numbered_layers(model: torch.nn.Module) -> Iterator[None]:
    """Marks each traced node with the number of the layer that it belongs to. Layers are what the model's library checkpoints."""
    from torch.fx.traceback import annotate, preserve_node_meta
    from transformers.modeling_layers import GradientCheckpointingLayer

    numbers = itertools.count()

    def run(layer: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        # A layer inside another one has its own number, as in torch.compile.
        with annotate({"layer": next(numbers)}):
            return layer(*args, **kwargs)

    for name in ("set_grad_checkpointing", "enable_gradient_checkpointing"):
        if hasattr(model, name):
            getattr(model, name)()
    for module in model.modules():
        # Layers of transformers checkpoint themselves in training only.
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = functools.partial(run, module.forward)
    with preserve_node_meta(), mock.patch("torch.utils.checkpoint.checkpoint", run):
        yield


def tag_layers(module: torch.fx.GraphModule, selective: bool) -> None:
    """Tags the forward nodes of layers for recomputation, as torch.compile does in checkpointed functions."""
    from torch._functorch.partitioners import get_default_op_list
    from torch.utils.checkpoint import CheckpointPolicy

    ops = get_default_op_list()
    nodes = [
        node
        for node in module.graph.nodes
        if "layer" in node.meta.get("custom", {}) and node.meta["partitioner_tag"] == "is_forward"
    ]
    if not nodes:
        raise NotImplementedError("the model's library offers no checkpointing of layers")
    for node in nodes:
        op = node.args[0] if node.target is operator.getitem else node
        save = selective and ops.is_compute_intensive(op)
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = node.meta["custom"]["layer"]


def split(module: torch.fx.GraphModule, peer: str) -> tuple[Any, float]:
    """Returns what a peer's partitioner makes of a joint graph, and its CPU time."""
    from torch._functorch import config

    partition, settings = partitions(peer)
    own = copy.deepcopy(module)
    if peer in CHECKPOINTING:
        tag_layers(own, peer == "selective")
    start = cpu_seconds()
    with config.patch(settings), corrected():
        return partition(own, None, num_fwd_outputs=1), cpu_seconds() - start


def warm_up(peers: list[str]) -> None:
    """Lets the partitioners import what they import when they are first called."""
    with ExitStack() as stack:
        module = joint_of(torch.nn.Linear(2, 2, device="meta"), {"input": torch.empty(2, 2, device="meta")}, stack)
        # This model has no layers, so peers that checkpoint layers fail on it; they call the same partitioner as `mincut`.
        for peer in ["mincut", *peers]:
            with contextlib.suppress(Exception):
                split(module, peer)


def compared(name: str, peers: list[str]) -> tuple[list[Row], dict[str, Any]]:
    """Returns a row for each peer, and the cost graph."""
    rows: list[Row] = []
    model, inputs = built(name)
    with ExitStack() as stack:
        module = joint_of(model, inputs, stack)
        start = cpu_seconds()
        joint = Joint(module, 1)
        graph = joint.cost_graph(Prices(measure=False, fused=False), in_place=True)
        about = {
            "model": name,
            "ops": len(joint.ops),
            "unplanned": peak_of(graph, list(range(len(joint.ops)))),
            "static": static_bytes(graph),
            "graph_seconds": round(cpu_seconds() - start, 4),
        }
        places = {op.node.name: i for i, op in enumerate(joint.ops)}
        once = sum(op["flops"] for op in graph["ops"])
        for peer in peers:
            try:
                halves, seconds = split(module, peer)
            except Exception as error:
                rows.append(failed(name, peer, error))
                continue
            # What is handed over is an input of the same name.
            nodes = [node for half in halves for node in half.graph.nodes if node.op != "placeholder"]
            schedule = [places[node.name] for node in nodes if node.name in places]
            added = 100 * (sum(graph["ops"][op]["flops"] for op in schedule) / max(once, 1) - 1)
            planned = {"peak": peak_of(graph, schedule), "flops_pct": added, "seconds": round(seconds, 4)}
            rows.append(about | {"peer": peer} | planned)
    return rows, graph


def failed(name: str, peer: str, error: Exception) -> Row:
    return {"model": name, "peer": peer, "failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def own_rows(rows: list[Row], graph: dict[str, Any]) -> list[Row]:
    """Returns rows without plans at multiples of the smallest peak, for the model of rows of peers."""
    about = next(({k: row[k] for k in ABOUT if k in row} for row in rows if "peak" in row), None)
    if about is None:
        return []
    above = smallest_peak(graph) - about["static"]
    peaks = {times: about["static"] + int(above * times) for times in MULTIPLES}
    return [
        about | {"peer": OURS, "multiple": times, "peak": peak}
        for times, peak in peaks.items()
        if peak < about["unplanned"]
    ]


def with_plans(rows: list[Row], graph: dict[str, Any]) -> list[Row]:
    """Returns rows with our plans at their peaks."""
    rows = [{k: v for k, v in row.items() if not k.startswith("ours_")} for row in rows]
    ours: dict[int, Row] = {}
    for row in rows:
        if "peak" in row:
            if row["peak"] not in ours:
                ours[row["peak"]] = own_plan(graph, row["peak"])
            row |= ours[row["peak"]]
    return rows


def smallest_peak(graph: dict[str, Any]) -> int:
    """Returns the smallest peak that the planner knows a plan for."""
    try:
        solve(graph, static_bytes(graph) + 1, "flops", "normal")
    except BudgetError as error:
        return error.smallest_bytes or 0
    return static_bytes(graph) + 1


def own_plan(graph: dict[str, Any], peak: int) -> Row:
    """Plans within a peak for the least added operations."""
    start = cpu_seconds()
    try:
        decisions, report = solve(graph, peak, "flops", "normal")
    except BudgetError as error:
        return {"ours_failed": str(error).split("\n")[0]}
    return {
        "ours_peak": peak_of(graph, decisions["schedule"]),
        "ours_flops_pct": report["flops_overhead_pct"],
        "ours_bound_pct": report["lower_bound_pct"],
        "ours_seconds": round(cpu_seconds() - start, 4),
    }


def work(name: str, peers: list[str], path: Path, graphs: Path | None) -> None:
    """Appends a model's rows for these peers to the results; a model that cannot be traced is one row."""
    torch.set_num_threads(1)
    try:
        warm_up(peers)
        rows, graph = compared(name, peers)
        if graphs:
            kept(graphs, name).write_bytes(gzip.compress(json.dumps(graph).encode()))
        if not any("peak" in row for row in rows_of(name, results.read(path))):
            rows += own_rows(rows, graph)
        rows = with_plans(rows, graph)
    except Exception as error:
        rows = [failed(name, "", error)]
    results.append(path, rows)


def kept(graphs: Path, name: str) -> Path:
    return graphs / f"{name.replace('/', '-')}.json.gz"


def plan_again(path: Path, graphs: Path, models: list[str]) -> None:
    """Plans the rows of models again from the cost graphs that were kept."""
    for name in models:
        rows = results.read(path)
        own = [row for row in rows_of(name, rows) if row["peer"] != OURS]
        if kept(graphs, name).exists() and own:
            graph = json.loads(gzip.decompress(kept(graphs, name).read_bytes()))
            own = with_plans(own + own_rows(own, graph), graph)
            path.write_text("")
            results.append(path, [*(row for row in rows if row["model"] != name), *own])
            print(f"{name}: planned again", file=sys.stderr, flush=True)


def rows_of(name: str, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["model"] == name]


def wrong(row: Row) -> str:
    """Returns what is wrong with a row, if anything is."""
    if "failed" in row:
        return ""
    if "ours_failed" in row:
        return str(row["ours_failed"])
    if row["ours_peak"] > row["peak"]:
        return f"the plan's peak is {row['ours_peak']} bytes"
    if "flops_pct" in row and row["ours_flops_pct"] > row["flops_pct"] + ROUNDING_PCT:
        return f"{row['ours_flops_pct']:.3f} % are added, the peer adds {row['flops_pct']:.3f} %"
    return ""


def table(rows: list[Row]) -> list[str]:
    """Returns a line for each peer, over all models."""
    lines = [
        "| peer | graphs | ours is no worse | ours is better | added FLOPs, % (median: peer, ours) | gap to the bound ≤ 1 point | seconds (median: peer, ours) | ours / peer (median) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for peer in dict.fromkeys(row["peer"] for row in rows if "flops_pct" in row):
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
        timed = [row for row in planned if "graph_seconds" in row]
        took = [statistics.median(map(each, timed)) for each in (theirs, seconds)] if timed else [0, 0]
        ratio = statistics.median(seconds(row) / theirs(row) for row in timed) if timed else 0
        lines.append(
            f"| {peer} | {len(own)} | {good} | {better} | {flops[0]:.1f}, {flops[1]:.1f} | {close} | {took[0]:.2f}, "
            f"{took[1]:.2f} | {ratio:.2f} |"
        )
    return lines


def seconds(row: Row) -> float:
    return float(row["graph_seconds"] + row["ours_seconds"])


def theirs(row: Row) -> float:
    return max(float(row["seconds"]), 1e-3)


def own_table(rows: list[Row]) -> list[str]:
    """Returns a line for each multiple of the smallest peak, over all models."""
    lines = [
        "| smallest peak × | graphs | planned | added FLOPs, % (median) | gap to the bound, points (median, largest) | ≤ 1 point | seconds (median) |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for times in MULTIPLES:
        own = [row for row in rows if row.get("multiple") == times]
        good = [row for row in own if "ours_peak" in row]
        if not good:
            continue
        gaps = [row["ours_flops_pct"] - row["ours_bound_pct"] for row in good]
        lines.append(
            f"| {times} | {len(own)} | {len(good)} | {statistics.median(row['ours_flops_pct'] for row in good):.1f} "
            f"| {statistics.median(gaps):.2f}, {max(gaps):.1f} | {sum(gap <= 1 for gap in gaps)} "
            f"| {statistics.median(map(seconds, good)):.2f} |"
        )
    return lines


def halved(rows: list[Row]) -> str:
    """Returns in how many rows of tight min-cut budgets we add at most half of what the peer adds, and why not in the others."""
    own = [row for row in rows if row["peer"].endswith((":0.25", ":0.1")) and "ours_peak" in row]
    more = [row for row in own if row["ours_flops_pct"] > row["flops_pct"] / 2 + ROUNDING_PCT]
    proven = sum(row["ours_bound_pct"] > row["flops_pct"] / 2 for row in more)
    return (
        f"At budgets of 0.25 and 0.1, our plan adds at most half of the FLOPs that the peer adds in {len(own) - len(more)} of "
        f"{len(own)} rows. In {proven} of the other rows, our bound proves that no plan within the peer's peak adds so few."
    )


def proven(rows: list[Row]) -> str:
    """Returns how many plans are proven to be within a point of the best, at the peaks of peers and near the smallest."""
    planned = [row for row in rows if "ours_peak" in row]
    close = [row for row in planned if row["ours_flops_pct"] - row["ours_bound_pct"] <= 1]
    of_peers = [sum(row["peer"] != OURS for row in some) for some in (close, planned)]
    return (
        f"{len(close)} of {len(planned)} plans are within a point of their bound: {of_peers[0]} of {of_peers[1]} at the peaks of "
        f"peers, and {len(close) - of_peers[0]} of {len(planned) - of_peers[1]} near the smallest peak."
    )


SIDE, EDGE = 420, 50
COLORS = {
    "mincut:dp": "#0072b2",
    "mincut:greedy": "#d55e00",
    "mincut:ilp": "#009e73",
    "layers": "#cc79a7",
    "selective": "#e69f00",
    "": "#555555",
}
"""By the start of a peer's name."""


def picture(rows: list[Row]) -> str:
    """Returns a scatter plot: for each graph and peer, the FLOPs that the peer adds, and those that we add at its peak."""
    planned = [row for row in rows if "ours_peak" in row and "flops_pct" in row]
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
        color = next(color for start, color in COLORS.items() if row["peer"].startswith(start))
        x, y = EDGE + at(row["flops_pct"]), bottom - at(row["ours_flops_pct"])
        name = f"{row['model']}, {row['peer']}: {row['flops_pct']:.2f} %, ours {row['ours_flops_pct']:.2f} %"
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity="0.6"><title>{name}</title></circle>'
        )
    lines.append(
        f'<text x="{EDGE + SIDE / 2}" y="{bottom + 36}" text-anchor="middle">FLOPs that the peer adds, %</text>'
    )
    lines.append(
        f'<text x="14" y="{EDGE + SIDE / 2}" text-anchor="middle" transform="rotate(-90 14 {EDGE + SIDE / 2})">'
        "ours at the same peak, %</text>"
    )
    for i, (start, color) in enumerate(COLORS.items()):
        y = EDGE + 6 + 18 * i
        lines.append(f'<circle cx="{EDGE + 16}" cy="{y}" r="4" fill="{color}"/>')
        lines.append(f'<text x="{EDGE + 26}" y="{y + 4}">{start or "others"}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    global LAYERS
    arguments = options.with_binary(__doc__)
    results.add_option(arguments, required=True)
    arguments.add_argument("--model", type=options.words, default=options.words(MODELS), help="names")
    arguments.add_argument("--peer", type=options.words, default=options.words(PEERS), help=f"[default: {PEERS}]")
    options.add_counts(arguments, minutes=10, layers=LAYERS)
    options.add_page(arguments)
    arguments.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the rows")
    arguments.add_argument("--graphs", type=Path, metavar="DIR", help="keep cost graphs here")
    arguments.add_argument("--replan", action="store_true", help="plan rows again from the cost graphs of --graphs")
    given = arguments.parse_args()
    LAYERS = given.layers
    os.environ["CKPT_OPT_BIN"] = str(given.ckpt_opt)
    if given.graphs:
        given.graphs.mkdir(parents=True, exist_ok=True)
    if given.replan:
        if not given.graphs:
            arguments.error("--replan needs --graphs")
        plan_again(given.results, given.graphs, given.model)
    # Processes begin with what is imported here. No tensor is computed here: autograd's threads do not survive a fork.
    import timm  # noqa: F401
    import transformers  # noqa: F401

    fork = multiprocessing.get_context("fork")
    for name in given.model:
        # A row without a peer is a model that failed.
        done = {row["peer"] for row in rows_of(name, results.read(given.results))}
        peers = [] if "" in done else [peer for peer in given.peer if peer not in done]
        if not peers:
            continue
        process = fork.Process(target=work, args=(name, peers, given.results, given.graphs))
        process.start()
        process.join(60 * given.minutes)
        if process.is_alive():
            process.kill()
            process.join()
            results.append(given.results, [{"model": name, "peer": "", "failed": f"more than {given.minutes} minutes"}])
        print(f"{name}: {len(rows_of(name, results.read(given.results)))} rows", file=sys.stderr, flush=True)
    rows = [row for row in results.read(given.results) if row["model"] in given.model]
    lines = [*table(rows), "", halved(rows), "", *own_table(rows), "", proven(rows)]
    print("\n".join(lines))
    if given.picture:
        given.picture.write_text(picture(rows))
    # The peers of a model fail alike.
    notes = list(dict.fromkeys(f"{row['model']}: {row['failed']}" for row in rows if "failed" in row))
    failures = [
        f"{row['model']} {row['peer']} {row.get('multiple', '')}: {text}" for row in rows if (text := wrong(row))
    ]
    graphs = len({row["model"] for row in rows if "ours_peak" in row})
    head = page.head(
        f"{graphs} models, PyTorch {torch.__version__}, batch {SIZES.batch}, {SIZES.seq} tokens, {given.layers} layers",
        1,
    )
    drawn = []
    if given.picture:
        drawn = [f"![FLOPs that peers add, and ours at the same peaks](pictures/{given.picture.name})", ""]
    lines = [head, "", *drawn, *lines]
    return page.finish("Plans and PyTorch's partitioners", lines, notes, failures, given.page)


if __name__ == "__main__":
    sys.exit(main())
