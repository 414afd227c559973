"""The models that the kit measures, their plans, and their weights, which are made from a seed where the kit runs."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WEIGHTS, TABLE, FEED = "weights.bin", "weights.json", "feed.npz"
ALIGNMENT_BYTES = 64
CHUNK_ELEMENTS = 1 << 24
ITEM_BYTES = {"f32": 4, "bf16": 2}
NORM_SPREAD = 0.02
LEARNING_RATE = np.float32(1e-3)


@dataclass(frozen=True)
class Model:
    """A model of `tools/lib/models.py` at one size."""

    name: str
    module: str
    dtype: str
    batch: int
    seq: int
    fixture: str | None = None
    """The fixture that is the export, instead of a new one."""

    @property
    def dims(self) -> dict[str, int]:
        return {"batch": self.batch, "seq": self.seq}


NAMES = ("llama-1b", "gpt2-small")
MODELS = (Model("llama-1b", "llama1b", "bf16", 8, 2048), Model("gpt2-small", "gpt2", "bf16", 8, 1024))
SMALL = (
    Model("llama-1b", "llama_fixture", "f32", 2, 16, fixture="llama32"),
    Model("gpt2-small", "tiny", "f32", 2, 16, fixture="gpt2"),
)
"""What stands for them in a dry run."""

UNPLANNED = "unplanned"
PEAK = "PEAK"
"""Stands for the peak of `--policy full`."""
PLANS: dict[str, tuple[str, ...]] = {
    UNPLANNED: ("--policy", "none"),
    "planned": ("--budget", PEAK),
    "tiled-loss": ("--budget", PEAK, "--tile-loss", "8"),
    "offload": ("--policy", "full", "--offload", "block-inputs"),
}
SGD = ("--optimizer", "sgd", "--fuse-optimizer")
WHOLE_STEPS: dict[str, tuple[str, ...]] = {
    "sgd": ("--policy", "none", "--optimizer", "sgd"),
    "sgd-14.5GB": ("--budget", "14.5GB", "--tile-loss", "8", *SGD),
    "sgd-8GB": ("--budget", "8GB", "--tile-loss", "8", *SGD),
}
"""Plans of the larger model that update its parameters."""
SAME_BITS = ("planned", "offload")
"""Plans that change no bit."""


def place(entries: list[dict]) -> int:
    """Gives each parameter its offset in the weight file, and returns the size of the file."""
    end = 0
    for entry in entries:
        count = int(np.prod(entry["shape"], dtype=np.int64))
        entry["offset"] = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        entry["bytes"] = count * ITEM_BYTES[entry["dtype"]]
        end = entry["offset"] + entry["bytes"]
    return end


def chunks(entry: dict) -> Iterator[tuple[int, int]]:
    """Yields the first element of each chunk of a parameter, and how many there are."""
    count = entry["bytes"] // ITEM_BYTES[entry["dtype"]]
    for first in range(0, count, CHUNK_ELEMENTS):
        yield first, min(CHUNK_ELEMENTS, count - first)


def drawn(entry: dict, first: int, count: int) -> bytes:
    """Returns elements of a parameter: matrices keep the variance of activations, norm weights are near one."""
    shape, name = entry["shape"], entry["initializer"]
    draws = np.random.default_rng([zlib.crc32(name.encode()), first]).standard_normal(count, dtype=np.float32)
    draws *= NORM_SPREAD if len(shape) < 2 else min(shape) ** -0.5
    if len(shape) < 2 and name.endswith("weight"):
        draws += 1.0
    if entry["dtype"] == "bf16":
        # The upper half of a float32 is a bfloat16.
        return (draws.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return draws.tobytes()


def fill(folder: Path, dims: dict[str, int], classes: int) -> int:
    """Writes weights and token ids from a seed, and returns the bytes of the weights."""
    entries = json.loads((folder / TABLE).read_text())
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(place(entries))

        def write(job: tuple[dict, int, int]) -> int:
            entry, first, count = job
            at = entry["offset"] + first * ITEM_BYTES[entry["dtype"]]
            return os.pwrite(file.fileno(), drawn(entry, first, count), at)

        jobs = [(entry, *chunk) for entry in entries for chunk in chunks(entry)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            written = sum(pool.map(write, jobs))
    tokens = np.random.default_rng(1).integers(3, classes, (dims["batch"], dims["seq"]))
    np.savez(folder / FEED, input_ids=tokens, labels=tokens, lr=LEARNING_RATE)
    return written
