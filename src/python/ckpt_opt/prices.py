"""What a node of a graph costs: its time by a model of the device or by measurement, its arithmetic and its traffic."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import lowering
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ckpt_opt.joint import bytes_of, is_collective, number, tensors_of

# Peak TFLOP/s of matrix products in float32 (as PyTorch runs them) and in 16-bit types, GB/s of memory, and GB/s to the memory of
# the host. From NVIDIA's data sheets, dense, at 70 % of the peak for products; 80 % of PCI Express. On a CPU, what is
# offloaded is in a file.
DEVICES = {
    "H200": (47.0, 692.0, 4800.0, 50.0),
    "H100": (47.0, 692.0, 3350.0, 50.0),
    "A100": (14.0, 218.0, 1935.0, 25.0),
    "L40": (63.0, 127.0, 864.0, 25.0),
    "L4": (21.0, 85.0, 300.0, 25.0),
    "RTX 4090": (58.0, 116.0, 1008.0, 25.0),
}
OTHER_GPU = (20.0, 100.0, 1000.0, 12.0)
CPU = (0.1, 0.1, 20.0, 2.5)
LAUNCH_US = 1.0
FUSED_TRAFFIC = 0.3
"""Share of the traffic of a node that is left where a compiler fuses it with its neighbours. It has no launch of its own then."""


class Prices:
    """Prices of nodes.

    Args:
        measure: Measure the time of each op, once for its sizes. Otherwise, and for collectives, a model of the device tells it.
        fused: The graph is compiled, and neighbours are fused that call no library.
    """

    def __init__(self, measure: bool, fused: bool) -> None:
        self._measures = measure
        self._fused = fused
        self._times: dict[Any, float | None] = {}
        self._scratch: dict[Any, int | None] = {}
        self._device = torch.device("cpu")

    def __call__(self, node: fx.Node) -> tuple[float, int, int, int]:
        """Returns microseconds, floating-point operations, bytes read and written, and bytes of scratch."""
        target, args, result = node.target, node.args, node.meta.get("val")
        if target is run_and_save_rng_state:
            target, args, result = args[0], args[1:], node.meta["val"][1]
        values = fx.node.map_arg((args, node.kwargs), lambda operand: operand.meta.get("val"))
        flops = flops_of(target, values, result)
        operands = [t for operand in node.all_input_nodes for t in tensors_of(operand.meta.get("val"))]
        moved = sum(bytes_of(t) for t in [*operands, *tensors_of(result)])
        for tensor in tensors_of(result):
            self._device = tensor.device
        us = self._tried(self._times, target, values, median_us) if self._measures else None
        # Kernels that a compiler makes of pointwise ops take none.
        scratch = self.scratch(target, *values) if self._measures or flops else 0
        fuses = self._fused and not flops and not calls_library(target)
        us = modelled_us(flops, moved, tensors_of(result), fuses) if us is None else us
        return us, flops, moved, scratch

    def scratch(self, target: Any, args: Any, kwargs: Any) -> int:
        """Returns the bytes that an op takes while it runs, besides operands and results; 0 if it does not run on made-up data."""
        if self._device.type == "meta" or not any(isinstance(t, torch.Tensor) for t in tree_leaves((args, kwargs))):
            return 0
        return self._tried(self._scratch, target, (args, kwargs), scratch_bytes) or 0

    def transfer(self) -> dict[str, float]:
        """Returns what it costs to move bytes out of the memory of the device of the last node, as cost graphs have it."""
        return {"us_per_megabyte": 1e3 / rates(self._device)[3], "start_us": LAUNCH_US}

    def _tried(self, known: dict[Any, Any], target: Any, values: Any, look: Callable[[Callable[[], Any]], Any]) -> Any:
        """Runs an op on made-up data, once for its sizes, and returns what `look` measures; `None` if it does not run on such data.

        Collectives do not run here: other processes could take them for collectives of the model.
        """
        if is_collective(target):
            return None
        key = (str(target), repr(tree_map(described, values)))
        if key not in known:
            try:
                with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng():
                    args, kwargs = tree_map(lambda value: filled(value, self._device), values)
                    known[key] = look(lambda: target(*args, **kwargs))
            except Exception:
                known[key] = None
        return known[key]


def calls_library(target: Any) -> bool:
    """Returns true if inductor has no code of its own for an op, so that nothing is fused with it."""
    return target not in lowering.lowerings or target in lowering.fallbacks


def modelled_us(flops: int, moved: int, results: list[torch.Tensor], fuses: bool) -> float:
    """Returns the time of a node in microseconds by the rates of its device."""
    single, half, bandwidth, _ = rates(results[0].device if results else torch.device("cpu"))
    peak = half if results and results[0].dtype in (torch.float16, torch.bfloat16) else single
    us = max(flops / (peak * 1e6), moved / (bandwidth * 1e3))
    return FUSED_TRAFFIC * us if fuses else LAUNCH_US + us


def rates(device: torch.device) -> tuple[float, float, float, float]:
    """Returns TFLOP/s in float32 and in 16-bit types, GB/s, and GB/s out of the device's memory."""
    if device.type != "cuda":
        return CPU
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    return next((figures for word, figures in DEVICES.items() if word in name), OTHER_GPU)


def flops_of(target: Any, values: Any, result: Any) -> int:
    """Returns the floating-point operations of an op by `FORMULAS`, else by PyTorch's formulas; 0 if there is none."""
    packet = getattr(target, "_overloadpacket", target)
    formula = FORMULAS.get(str(packet)) or flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = values
    try:
        return number(formula(*args, **kwargs, out_val=result))
    except Exception:
        return 0


def convolution_backward_flops(grad: Any, x: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Returns the FLOPs of the gradients that are asked for; PyTorch's formula counts each group as if it had all channels."""
    transposed, mask = args[4], args[-1]
    moved = x if transposed else grad
    each = 2 * number(moved.numel()) * number(weight.numel()) // number(weight.shape[0])
    return each * (int(mask[0]) + int(mask[1]))


def grouped_mm_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the products of groups of rows, columns or sums, or of whole matrices; PyTorch has no formula."""
    columns = number(a.shape[1]) if a.dim() == 3 and b.dim() == 2 else number(b.shape[-1])
    return 2 * number((b if a.dim() == 3 and b.dim() == 2 else a).numel()) * columns


def grouped_mm_backward_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the gradients of both operands."""
    return 2 * grouped_mm_flops(a, b)


def attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the scores and of the sums of values, masked ones included, as PyTorch counts them on GPUs."""
    return attention_products(q, k) * (number(q.shape[-1]) + number(v.shape[-1]))


def attention_backward_flops(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> int:
    """Returns the FLOPs of the scores, which are computed again, and of four gradients."""
    return attention_products(q, k) * (3 * number(q.shape[-1]) + 2 * number(v.shape[-1]))


def attention_products(q: Any, k: Any) -> int:
    """Returns the FLOPs of a product of each query with each key, by component."""
    return 2 * number(q.numel()) // number(q.shape[-1]) * number(k.shape[-2])


FORMULAS: dict[str, Callable[..., int]] = {
    "aten.convolution_backward": convolution_backward_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "aten._scaled_dot_product_fused_attention_overrideable": attention_flops,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": attention_backward_flops,
    "aten._grouped_mm": grouped_mm_flops,
    "transformers.grouped_mm_fallback": grouped_mm_flops,
    "transformers.grouped_mm_fallback_backward": grouped_mm_backward_flops,
}
"""Formulas where PyTorch has none or a wrong one, by op. Arguments are those of the op, and `out_val` is its result."""


def described(value: Any) -> Any:
    """Returns what the time of an op depends on."""
    if isinstance(value, torch.Tensor):
        return tuple(map(number, value.shape)), tuple(map(number, value.stride())), value.dtype
    return repr(value)


def filled(value: Any, device: torch.device) -> Any:
    """Returns a tensor with data in place of one without, and a number in place of a symbolic size.

    A tensor on PyTorch's `meta` device is made on the given one.
    """
    if isinstance(value, torch.SymInt):
        return number(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
    place = device if value.device.type == "meta" else value.device
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=place)
    return made.normal_() if value.is_floating_point() else made.zero_()


def median_us(work: Callable[[], Any], seconds: float = 0.02) -> float:
    """Returns the median time of at least three runs in microseconds."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - start < seconds and len(taken) < 20):
        wait()
        before = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - before)
    return 1e6 * sorted(taken)[len(taken) // 2]


def scratch_bytes(work: Callable[[], Any]) -> int:
    """Returns how many bytes more are allocated during a run than after it."""
    peak, left = device_bytes(work) if torch.cuda.is_available() else allocated_bytes(work)
    return peak - left


def device_bytes(work: Callable[[], Any]) -> tuple[int, int]:
    """Returns what `allocated_bytes` returns, for a run on the current CUDA device."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    torch.cuda.reset_peak_memory_stats()
    kept = work()
    stats = torch.cuda.memory_stats()
    del kept
    return stats["requested_bytes.all.peak"] - before, stats["requested_bytes.all.current"] - before


def allocated_bytes(work: Callable[[], Any]) -> tuple[int, int]:
    """Returns how many bytes more are allocated than before a run on the CPU: at most, and with the run's result at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            kept = work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak, live
