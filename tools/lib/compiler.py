"""The ckpt-opt binary as Python calls, and the tensor files that it reads and writes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.lib.options import dim_options

NO_PLAN_FITS = 3
"""The exit code for a budget that no plan fits into."""
EXECUTING = {"train", "run", "verify", "calibrate", "profile", "overhead", "doctor"}
"""The commands that need the runtime. Others start faster in a build without it, which `CKPT_OPT_PLANNER` may name."""
MESSAGE_LETTERS = 400
"""A long message keeps this many letters of its beginning, and of its end."""


class Refused(Exception):
    """The binary ended with an exit code other than 0. The message holds the code and the binary's message."""

    smallest_budget: str | None = None
    """The smallest feasible budget in bytes, if the binary reported one as JSON."""


@dataclass(frozen=True)
class Compiler:
    binary: Path
    timeout_s: float = 600.0
    options: tuple[str, ...] = ()
    """More options of `optimize`."""

    def call(self, *arguments: str | Path | float) -> str:
        """Runs one command and returns its stdout."""
        words = [*map(str, arguments)]
        planner = os.environ.get("CKPT_OPT_PLANNER")
        command = [planner if planner and EXECUTING.isdisjoint(words) else str(self.binary), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            raise Refused(f"no answer after {self.timeout_s:.0f} s: {' '.join(command[1:])}") from None
        if done.returncode != 0:
            message = " ".join((done.stderr or done.stdout).split())
            if len(message) > 2 * MESSAGE_LETTERS:
                message = f"{message[:MESSAGE_LETTERS]} … {message[-MESSAGE_LETTERS:]}"
            refused = Refused(f"exit {done.returncode}: {message}")
            if done.returncode == NO_PLAN_FITS and "--format" in command:
                refused.smallest_budget = str(json.loads(done.stdout)["smallest_feasible_bytes"])
            raise refused
        return done.stdout

    def call_json(self, *arguments: str | Path | float) -> dict:
        text = self.call(*arguments, "--format", "json")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise Refused(f"stdout is not one JSON object: {error}") from None

    def optimize(
        self, model: Path, out: Path, policy: str, loss: str | None, dims: dict[str, int] | None = None
    ) -> dict:
        """Writes the training graph of a model and returns the report.

        `policy` may be a budget, such as `budget:50%`. If no plan fits into it, the smallest feasible budget is used.
        With `loss` None the binary chooses the loss. `dims` are the sizes to plan for.
        """
        name, _, argument = policy.partition(":")
        chosen = ["--budget", argument] if name == "budget" else ["--policy", policy]
        arguments = [*(["--loss", loss] if loss else []), *dim_options(dims or {}), *self.options]
        try:
            return self.call_json(model, "-o", out, *chosen, *arguments)
        except Refused as refused:
            if name != "budget" or refused.smallest_budget is None:
                raise
            return self.call_json(model, "-o", out, "--budget", refused.smallest_budget, *arguments)

    def inspect(self, model: Path) -> dict:
        return self.call_json("inspect", model)

    def run(self, model: Path, inputs: Path, outputs: Path) -> dict:
        return self.call_json("run", model, "--inputs", inputs, "--outputs", outputs)

    def run_tensors(
        self, model: Path, feeds: dict[str, np.ndarray], folder: Path, suffix: str = ".safetensors"
    ) -> dict[str, np.ndarray]:
        """Runs a model on tensors and returns its outputs. The files in between are written to `folder`."""
        inputs, outputs = folder / f"inputs{suffix}", folder / f"outputs{suffix}"
        write_tensors(inputs, feeds)
        self.run(model, inputs, outputs)
        return read_tensors(outputs)

    def verify(self, a: Path, b: Path, inputs: Path | None = None) -> str:
        """Compares two graphs on the inputs of a file, or on random ones of the default sizes."""
        at: list[str | Path] = ["--inputs", inputs] if inputs else []
        return self.call("verify", a, b, *at)

    def calibrated(self, folder: Path, threads: int, device: str = "cpu") -> Path:
        """Returns the device profile that `folder` keeps; measures the device first if there is none."""
        path = folder / f"device-{device.replace(':', '')}-{threads}.json"
        if not path.exists():
            self.call("calibrate", "-o", path, "--threads", str(threads), "--device", device)
        return path


def missing_inputs(model: Path) -> list[str | Path]:
    """Returns the options that give a TorchScript file the types of its inputs, from the example beside it."""
    if model.suffix != ".pt":
        return []
    own = model.with_suffix(".npz")
    return ["--inputs", own if own.is_file() else model.with_name("case.npz")]


def children_cpu_s() -> float:
    """Returns the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file and removes the file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    path.unlink()
    return digest


@functools.cache
def safetensors_dtypes() -> dict[str, type]:
    """Returns numpy's types by their names in safetensors files."""
    # Only here: all else works without this package.
    import ml_dtypes

    return {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
        "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }  # fmt: skip


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads npz or safetensors, by suffix."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    body = memoryview(data)[8 + header_bytes :]
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + header_bytes]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(body[begin:end], safetensors_dtypes()[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes npz or safetensors, by suffix."""
    if path.suffix == ".npz":
        np.savez(path, **tensors)
        return
    codes = {np.dtype(kind): code for code, kind in safetensors_dtypes().items()}
    header, blobs, offset = {}, [], 0
    for name, tensor in tensors.items():
        blob = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)]
        }  # fmt: skip
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
