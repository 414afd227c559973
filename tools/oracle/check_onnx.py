"""Checks ONNX files: the checker's full check, then strict shape inference with data propagation.

    python tools check_onnx [--absent-weights] FILE…

Exit code 0 if every file is clean, else 1 with the checker's message. `--absent-weights` is for files whose external weight
file does not exist: the model is checked beside sparse files of the right length, which take no disk space.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from tools.lib import options


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yields every tensor stored in a graph: initializers and tensor attributes, subgraphs included."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.GRAPH:
                yield from tensors(attribute.g)


def with_placeholder_weights(path: Path, folder: Path) -> Path:
    """Copies `path` into `folder` beside sparse files for its external data, and returns the copy."""
    ends: dict[str, int] = {}
    for tensor in tensors(onnx.load(path, load_external_data=False).graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {e.key: e.value for e in tensor.external_data}
            end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
            ends[entry["location"]] = max(end, ends.get(entry["location"], 0))
    for location, end_bytes in ends.items():
        placeholder = (folder / location).resolve()
        if not placeholder.is_relative_to(folder.resolve()):
            raise ValueError(f"external data leaves the model's folder: {location!r}")
        placeholder.parent.mkdir(parents=True, exist_ok=True)
        with placeholder.open("wb") as file:
            file.truncate(end_bytes)
    return Path(shutil.copy(path, folder / "model.onnx"))


def check(path: Path, absent_weights: bool = False) -> str | None:
    """Returns `None` if the file is clean, else what is wrong with it."""
    try:
        if absent_weights:
            with tempfile.TemporaryDirectory() as folder:
                copy = with_placeholder_weights(path, Path(folder))
                onnx.checker.check_model(str(copy), full_check=True)
        else:
            onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker raises several unrelated types
        return f"checker: {error}"
    try:
        model = onnx.load(path, load_external_data=False)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:
        return f"strict shape inference: {error}"
    return None


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--absent-weights", action="store_true")
    args = parser.parse_args()
    bad = 0
    for path in args.files:
        problem = check(path, args.absent_weights)
        print(f"{path}: {problem or 'ok'}", file=sys.stderr if problem else sys.stdout)
        bad += problem is not None
    return 1 if bad else 0
