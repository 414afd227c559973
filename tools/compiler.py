"""The ckpt-opt binary as Python calls, and the tensor files it reads and writes."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

SAFETENSORS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


SAID = 400
"""Letters of a long message that are kept, of its beginning and of its end."""


class Refused(Exception):
    """The binary ended with an exit code other than 0; the message has the code and what it said."""


@dataclass(frozen=True)
class Compiler:
    binary: Path
    timeout_s: float = 600.0
    options: tuple[str, ...] = ()
    """Further options of `optimize`."""

    def call(self, *arguments: str | Path) -> str:
        """Run one command and return its stdout."""
        command = [str(self.binary), *map(str, arguments)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            raise Refused(f"no answer after {self.timeout_s:.0f} s: {' '.join(command[1:])}") from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())
            if len(said) > 2 * SAID:
                said = f"{said[:SAID]} … {said[-SAID:]}"
            raise Refused(f"exit {done.returncode}: {said}")
        return done.stdout

    def call_json(self, *arguments: str | Path) -> dict:
        text = self.call(*arguments, "--format", "json")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise Refused(f"stdout is not one JSON object: {error}") from None

    def optimize(
        self, model: Path, out: Path, policy: str, loss: str | None, dims: dict[str, int] | None = None
    ) -> dict:
        """`policy` may be a budget, as `budget:50%`; where nothing fits into that one, it is the smallest that can be.
        `loss` None leaves the choice to the binary. `dims`: sizes to plan for."""
        name, _, argument = policy.partition(":")
        chosen = ["--budget", argument] if name == "budget" else ["--policy", policy]
        sizes = [word for name, size in (dims or {}).items() for word in ("--dim", f"{name}={size}")]
        arguments = [*(["--loss", loss] if loss else []), *sizes, *self.options]
        try:
            return self.call_json(model, "-o", out, *chosen, *arguments)
        except Refused as refused:
            smallest = re.search(r"; (\d+) is the smallest", str(refused))
            if name != "budget" or not smallest:
                raise
            return self.call_json(model, "-o", out, "--budget", smallest[1], *arguments)

    def inspect(self, model: Path) -> dict:
        return self.call_json("inspect", model)

    def run(self, model: Path, inputs: Path, outputs: Path) -> dict:
        return self.call_json("run", model, "--inputs", inputs, "--outputs", outputs)

    def verify(self, a: Path, b: Path, inputs: Path | None = None) -> str:
        """On random inputs of the usual sizes, or on those of a file."""
        return self.call("verify", a, b, *(["--inputs", inputs] if inputs else []))


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """npz or safetensors, by suffix."""
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
            flat = np.frombuffer(body[begin:end], SAFETENSORS[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """npz or safetensors, by suffix."""
    if path.suffix == ".npz":
        np.savez(path, **tensors)
        return
    codes = {np.dtype(kind): code for code, kind in SAFETENSORS.items()}
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
