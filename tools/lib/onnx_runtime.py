"""ONNX Runtime on the CPU, as one call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

SILENT = 4
"""Log severity. What ONNX Runtime has against a file comes back as an exception."""
UNOPTIMISED = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
OPTIMISED = ort.GraphOptimizationLevel.ORT_ENABLE_ALL


def session_of(
    model: Path | onnx.ModelProto, level: ort.GraphOptimizationLevel = OPTIMISED, threads: int = 2
) -> ort.InferenceSession:
    """Returns a session on the CPU that logs nothing."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = level
    settings.log_severity_level = SILENT
    settings.intra_op_num_threads = threads
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, settings, providers=["CPUExecutionProvider"])


def run_session(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns all outputs by name. Ignores feeds that are neither inputs nor weights that may be replaced."""
    inputs = {value.name for value in [*session.get_inputs(), *session.get_overridable_initializers()]}
    names = [value.name for value in session.get_outputs()]
    given = {name: tensor for name, tensor in feeds.items() if name in inputs}
    return dict(zip(names, session.run(names, given), strict=True))


def run_ort(
    model: Path | onnx.ModelProto, feeds: dict[str, np.ndarray], level: ort.GraphOptimizationLevel = OPTIMISED
) -> dict[str, np.ndarray]:
    """Runs a model once; see `run_session`."""
    return run_session(session_of(model, level), feeds)
