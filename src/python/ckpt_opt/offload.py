"""Ops that move results out of the device's memory and back, for the graphs that the writer makes.

On a CUDA device, results go to pinned memory of the host, on a stream for each direction. `release` and `arrive` let the
stream that computes wait, so that memory is freed and read where the plan has it. On a CPU, as in `ckpt-opt run`, a file takes
the place of the host's memory, and a transfer has ended when its op returns.
"""

from __future__ import annotations

import functools
import mmap
import tempfile

import torch

from ckpt_opt.joint import bytes_of

_transfers: dict[int, torch.cuda.Event] = {}
"""When a transfer ends, by the address of the tensor that it writes."""


@torch.library.custom_op("ckpt_opt::offload", mutates_args=())
def offload(tensor: torch.Tensor) -> torch.Tensor:
    """Begins to copy a tensor out of the device's memory; returns the copy, of the same layout."""
    if tensor.device.type != "cuda":
        return in_file(tensor).copy_(tensor)
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    _copy(host, tensor, tensor.device, "out")
    return host


@torch.library.custom_op("ckpt_opt::release", mutates_args={"tensor"})
def release(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Waits until a tensor has left the device."""
    _wait(host, tensor.device)


@torch.library.custom_op("ckpt_opt::fetch", mutates_args=())
def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begins to copy a tensor back to the device; returns the copy."""
    tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if device.type != "cuda":
        return tensor.copy_(host)
    _copy(tensor, host, device, "back")
    return tensor


@torch.library.custom_op("ckpt_opt::arrive", mutates_args={"tensor"})
def arrive(tensor: torch.Tensor) -> None:
    """Waits until a tensor has been copied back."""
    _wait(tensor, tensor.device)


@offload.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    place = tensor.device if tensor.device.type == "meta" else torch.device("cpu")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)


@fetch.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    place = host.device if host.device.type == "meta" else device
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=place)


def in_file(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same layout in a file that has no name and goes with it."""
    with tempfile.TemporaryFile(prefix="ckpt-opt-") as file:
        file.truncate(bytes_of(tensor))
        mapped = mmap.mmap(file.fileno(), bytes_of(tensor))
    return torch.frombuffer(mapped, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


@functools.cache
def _lane(device: torch.device, way: str) -> torch.cuda.Stream:
    """Returns the stream of a device for a direction."""
    return torch.cuda.Stream(device)


def _copy(to: torch.Tensor, source: torch.Tensor, device: torch.device, way: str) -> None:
    """Begins to copy on the stream of a direction, after what the device was told before."""
    lane = _lane(device, way)
    lane.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(lane):
        to.copy_(source, non_blocking=True)
        _transfers[to.data_ptr()] = lane.record_event()


def _wait(written: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(_transfers.pop(written.data_ptr()))
