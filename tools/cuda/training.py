"""Steps that measure training steps of the packed models: ours by plan, and PyTorch's on the same weights and inputs."""

from __future__ import annotations

import json
import mmap
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.cuda import models
from tools.cuda.context import PREFIX, Context, Skipped, lacks_peers
from tools.cuda.models import SAME_BITS, UNPLANNED, WHOLE_STEPS
from tools.lib import tolerance

if TYPE_CHECKING:
    import torch

STEPS = 5
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64"}
"""Names of types in safetensors files and in PyTorch."""
WIDER = {"bf16": "float32", "f32": "float64"}
"""The type in which the gradients are computed that others are judged by."""
MEMORY_BUDGET = 0.5
MOST_OPS = 8
"""So many ops of a traced step are recorded, those that take most time."""


GRAPHS, FUSED = "CUDA graphs", "fused kernels"
SWITCHES = {GRAPHS: ("--cuda-graphs", "on"), FUSED: ("--fused-kernels", "on")}


def outputs(cx: Context, model: str, plan: str) -> Path:
    return cx.work / "models" / model / f"{plan}.safetensors"


def ours(model: str, plan: str, *switches: str) -> Callable[[Context], None]:
    """Returns a step that runs a plan, compares its bits with the unplanned ones, and its memory with the prediction."""

    def step(cx: Context) -> None:
        folder = cx.work / "models" / model
        case = ", ".join((model, plan, *switches))
        words: list[str | Path | int] = ["--steps", STEPS]
        for switch in switches:
            words += SWITCHES[switch]
        # Fused kernels round otherwise, and gradients that nothing is compared with are not written.
        is_kept = FUSED not in switches and plan not in WHOLE_STEPS
        if is_kept:
            words += ["--outputs", outputs(cx, model, plan)]
        report = cx.run(case, folder / f"{plan}.onnx", ["--inputs", folder / models.FEED], *words)
        cx.records.add(plan=case, **cx.about["models"][model]["plans"][plan])
        cx.records.condition(f"{case}: loss and gradients are finite", not report["not_finite"], report["not_finite"])
        if GRAPHS in switches:
            cx.replayed(case, report)
        if is_kept and plan in SAME_BITS:
            cx.same(f"{case}: the bits of the unplanned step", outputs(cx, model, plan), outputs(cx, model, UNPLANNED))
        if is_kept and plan != UNPLANNED:
            outputs(cx, model, plan).unlink()

    return step


def times(model: str, *plans: str) -> Callable[[Context], None]:
    """Returns a step that records the time of each op in steps of some plans, where the host waits after every node."""

    def step(cx: Context) -> None:
        folder = cx.work / "models" / model
        for plan in plans:
            trace = cx.folder / f"{plan}.json"
            feed: list[str | Path] = ["--inputs", folder / models.FEED]
            cx.run(f"{model}, {plan}, traced", folder / f"{plan}.onnx", feed, "--trace", trace)
            spent: Counter[str] = Counter()
            for event in json.loads(trace.read_text())["traceEvents"]:
                if event["ph"] == "X":
                    spent[event["cat"]] += event["dur"]
            cx.records.add(times=f"{model}, {plan}", total_us=sum(spent.values()), most_us=spent.most_common(MOST_OPS))

    return step


class Peer:
    """PyTorch's side of a comparison: the model that was exported, with the weights and tokens of the kit."""

    def __init__(self, cx: Context, model: str) -> None:
        if lacking := lacks_peers():
            raise Skipped(lacking)
        import torch

        self.cx = cx
        self.about = cx.about["models"][model]
        self.folder = cx.work / "models" / model
        tokens = np.load(self.folder / models.FEED)["input_ids"]
        self.tokens = torch.from_numpy(tokens).to(cx.device)

    def module(self) -> torch.nn.Module:
        """Builds the model with the kit's weights."""
        import torch

        from tools.lib import models as modules

        with torch.device(self.cx.device):
            module = modules.build(self.about["module"], modules.DTYPES[self.about["dtype"]])
        # Without it, transformers warns about GPT-2, and the warning breaks a compiled graph.
        module.loss_type = "ForCausalLM"
        parameters = dict(module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for entry in self.entries():
                parameters[self.name(entry, parameters)].copy_(self.stored(entry))
        return module

    def entries(self) -> list[dict]:
        return json.loads((self.folder / models.TABLE).read_text())

    def name(self, entry: dict, parameters: dict[str, Any]) -> str:
        """Returns which of PyTorch's parameters an entry of the table is."""
        names = [name.removeprefix(start) for name in (entry["name"], *entry["aliases"]) for start in ("", PREFIX)]
        return next(name for name in names if name in parameters)

    def stored(self, entry: dict) -> torch.Tensor:
        """Reads a parameter in PyTorch's layout."""
        kind = {"f32": "F32", "bf16": "BF16"}[entry["dtype"]]
        tensor = tensor_at(mapped(self.folder / models.WEIGHTS), entry["offset"], entry["bytes"], kind, entry["shape"])
        return tensor.T if entry["transposed"] else tensor

    def measured(self, case: str, step: Callable, **known: object) -> int | None:
        """Records times and memory of a step after two that warm up, and returns the bytes that it requested on a device."""
        import torch

        on_device = self.tokens.is_cuda
        for _ in range(2):
            step()
        if on_device:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(STEPS):
            begun = time.perf_counter_ns()
            step()
            if on_device:
                torch.cuda.synchronize()
            times.append((time.perf_counter_ns() - begun) // 1000)
        stats = torch.cuda.memory_stats() if on_device else {}
        kinds = ("requested", "allocated", "reserved")
        memory = {f"{kind}_bytes": stats.get(f"{kind}_bytes.all.peak") for kind in kinds}
        self.cx.records.figures(case, steps_us=times, **memory, **known)
        print(f"{case}: {statistics.median(times) / 1e3:.3f} ms")
        return memory["requested_bytes"]


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def tensor_at(data: mmap.mmap, offset: int, size: int, kind: str, shape: list[int]) -> torch.Tensor:
    """Returns a tensor in the pages of a file; `kind` is its type in a safetensors file."""
    import torch

    dtype = getattr(torch, DTYPES[kind])
    return torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=offset).reshape(shape)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file as PyTorch's tensors, in the pages of the file."""
    data = mapped(path)
    header_bytes = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + header_bytes]).items():
        begin, end = entry["data_offsets"]
        tensors[name] = tensor_at(data, 8 + header_bytes + begin, end - begin, entry["dtype"], entry["shape"])
    return tensors


def eager(peer: Peer, module: torch.nn.Module) -> torch.nn.Module:
    return module


def checkpointed(peer: Peer, module: torch.nn.Module) -> torch.nn.Module:
    module.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return module


def compiled(peer: Peer, module: torch.nn.Module) -> torch.nn.Module:
    import torch

    # A dry run takes the same path up to the compiler of kernels.
    backend = "aot_eager_decomp_partition" if peer.cx.dry else "inductor"
    return torch.compile(module, dynamic=False, backend=backend)


def memory_budget(peer: Peer, module: torch.nn.Module) -> torch.nn.Module:
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = MEMORY_BUDGET
    return compiled(peer, module)


PEERS: dict[str, Callable[[Peer, Any], Any]] = {
    "eager": eager,
    "checkpointed": checkpointed,
    "memory budget": memory_budget,
    "compiled": compiled,
}


def theirs(model: str, way: str) -> Callable[[Context], None]:
    """Returns a step that measures PyTorch's training step."""

    def step(cx: Context) -> None:
        peer = Peer(cx, model)
        from tools.lib.models import eager_step

        module = PEERS[way](peer, peer.module())
        peer.measured(f"{model}, PyTorch {way}", eager_step(module, peer.tokens))

    return step


def gradients(model: str) -> Callable[[Context], None]:
    """Returns a step that judges the gradients of the unplanned step by PyTorch's in a wider type.

    The tolerances are those of `tolerance.py`, on the device: 16-bit gradients by their root mean square error beside that
    of PyTorch's own, float32 by their largest element.
    """

    def step(cx: Context) -> None:
        peer = Peer(cx, model)
        import torch

        from tools.lib.models import eager_step

        found = read_safetensors(outputs(cx, model, UNPLANNED))
        module = peer.module()
        names = [name for name, _ in module.named_parameters()]
        theirs = dict(zip(names, eager_step(module, peer.tokens)()))
        wide = checkpointed(peer, module.to(getattr(torch, WIDER[peer.about["dtype"]])))
        exact = dict(zip(names, eager_step(wide, peer.tokens)()))
        top = max(float(g.abs().max()) for g in exact.values())
        rows = []
        for entry in peer.entries():
            name = peer.name(entry, exact)
            ours = found[f"{entry['initializer']}.grad"].to(cx.device)
            ours = ours.T if entry["transposed"] else ours
            if not bool(ours.isfinite().all()):
                rows.append(tolerance.Worst(name, problem=f"{name}: the gradient is not finite"))
                continue
            errors = [(gradient - exact[name]).abs() for gradient in (ours, theirs[name])]
            if peer.about["dtype"] == "bf16":
                delta, own = (float(error.square().mean().sqrt()) for error in errors)
                allowed = tolerance.HALF_PRECISION_FACTOR * own
            else:
                delta = float(errors[0].max())
                allowed = tolerance.RELATIVE * float(exact[name].abs().max()) + tolerance.FLOOR * top
            rows.append(tolerance.measured(name, delta, allowed))
        worst = tolerance.pick(rows)
        cx.records.condition(f"{model}: {len(rows)} gradients agree with PyTorch's", worst.agrees, worst)

    return step
