"""Cases and their PyTorch gradients: from files where they are stored, from PyTorch where they must be computed.

A case is a folder with a model, `case.npz` (in.*, out.*, cot.*, perhaps labels) and either full gradients
(`grads.npz`, `grads_<kind>.npz`: the fixtures) or only their shape, sum and norm (`grads.json`: a corpus). For a corpus
whose generator script lies beside it (`../export_corpus.py`, which defines `fresh(case, size)`), and with torch and
transformers importable, the full gradients are computed here once, checked against `grads.json`, and cached.

Kinds of gradient: `own` (the model's own `loss` output), `vjp` (of the sum of out·cot), `causal-lm`, `cross-entropy`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from tools.lib import tolerance

MODEL_SUFFIXES = (".onnx", ".pt2", ".pt")
KINDS = ("own", "vjp", "causal-lm", "cross-entropy")
LABELLED = ("causal-lm", "cross-entropy")
IGNORE = -100
EXACT = "#exact."
"""How the names of float64 gradients begin in the cache."""


@dataclass(frozen=True)
class Reference:
    """PyTorch's word: gradients by framework name, the other names of tied parameters ({alias: name}), the loss where
    the kind has one, and for half-precision cases the float64 gradients."""

    full: dict[str, np.ndarray]
    aliases: dict[str, str]
    loss: float | None = None
    exact: dict[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Case:
    folder: Path
    model: Path
    several: bool = False
    """Whether other files of the same case are looked at too."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def label(self) -> str:
        """Returns the name for reports."""
        return f"{self.name}/{self.model.stem}" if self.several else self.name

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "case.npz") as archive:
            return dict(archive)

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """Returns the arrays whose key is `prefix.NAME`, by NAME."""
        return {k[len(prefix) + 1 :]: v for k, v in self.arrays.items() if k.startswith(prefix + ".")}

    @cached_property
    def random(self) -> bool:
        """Returns true if the model was exported in training mode: then no two PyTorch runs agree."""
        record = self.folder / "record.json"
        return record.is_file() and bool(json.loads(record.read_text()).get("train"))

    def labels(self) -> np.ndarray:
        """Returns stored labels, or seeded ones drawn from the case's own token ids, two of them ignored."""
        if "labels" in self.arrays:
            return self.arrays["labels"]
        tokens = next(v for v in self.group("in").values() if v.dtype == np.int64 and v.ndim == 2)
        labels = np.random.default_rng(5).choice(tokens.ravel(), tokens.shape)
        labels[0, tokens.shape[1] // 2] = labels[-1, -1] = IGNORE
        return labels


def find_models(corpus: Path, only: list[str], files: list[str]) -> list[tuple[str, Path]]:
    """Returns the models of a folder of folders as `(FOLDER/FILE, path)`, in name order.

    `only` names folders, none means all. `files` names files; `all` means every model, `first` the first of a folder.
    """
    found = []
    for folder in sorted(corpus.iterdir()):
        if not folder.is_dir() or (only and folder.name not in only):
            continue
        models = sorted(file for file in folder.iterdir() if file.suffix in MODEL_SUFFIXES)
        if files == ["first"]:
            models = models[:1]
        elif files != ["all"]:
            models = [file for file in models if file.name in files]
        found += [(f"{folder.name}/{file.name}", file) for file in models]
    return found


def find_cases(corpus: Path, only: list[str], files: list[str]) -> list[Case]:
    """Returns the cases of a folder in name order, each with those of `files` that it has. `all` means every ONNX file;
    none means model.onnx, else onnx18.onnx.
    """
    found = []
    for folder in sorted(corpus.iterdir()):
        if not (folder / "case.npz").is_file() or (only and folder.name not in only):
            continue
        if files == ["all"]:
            models = sorted(folder.glob("*.onnx"))
        else:
            models = [folder / f for f in files or ["model.onnx", "onnx18.onnx"] if (folder / f).is_file()]
        found += [Case(folder, model, bool(files)) for model in (models if files else models[:1])]
    missing = set(only) - {case.name for case in found}
    if missing or not found:
        raise FileNotFoundError(f"{corpus}: no case {', '.join(sorted(missing)) or 'at all'}")
    return found


def load_generator(corpus: Path) -> ModuleType | None:
    """Returns the corpus's generator as a module; `None` if it or one of its imports is missing."""
    script = corpus.resolve().parent / "export_corpus.py"
    if not script.is_file() or not all(importlib.util.find_spec(m) for m in ("torch", "transformers")):
        return None
    spec = importlib.util.spec_from_file_location("corpus_generator", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


def run_model(
    case: Case, generator: ModuleType, inputs: dict[str, np.ndarray], exact: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Returns the case's model and its outputs by name, computed on one thread and recorded for differentiation; in
    float64 if `exact`.
    """
    import torch

    torch.set_num_threads(1)
    built = generator.fresh(case.name, "tiny")
    built.model.requires_grad_(True)  # an adapter's frozen weights too: the exported file does not say that they are
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if exact:
        built.model.double()
        tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    listed = {name: len(value) for name, value in built.inputs.items() if isinstance(value, list)}
    for name, count in listed.items():  # a list of tensors is an input each in the file
        tensors[name] = [tensors.pop(f"{name}.{i}") for i in range(count)]
    answer = built.model(**tensors)
    answers = [answer] if isinstance(answer, torch.Tensor) else answer
    return built.model, dict(zip(case.group("out"), answers, strict=True))


def as_array(tensor: Any) -> np.ndarray:
    """Converts a PyTorch tensor to numpy; bfloat16 becomes float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.element_size() == 2 and tensor.is_floating_point() else tensor).numpy()


def forward(case: Case, generator: ModuleType, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns PyTorch's outputs of a corpus case, at any size of its inputs."""
    return {name: as_array(value) for name, value in run_model(case, generator, inputs)[1].items()}


def contents(case: Case, generator: ModuleType) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the values of PyTorch's parameters and buffers, and of the file's initializers, by name."""
    model = generator.fresh(case.name, "tiny").model
    values = {name: as_array(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return values, stored_tensors(case.model)


def stored_tensors(file: Path) -> dict[str, np.ndarray]:
    """Returns the initializers and constants of an ONNX file by name."""
    graph = onnx.load(file).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            stored[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return stored


def differentiate(
    case: Case,
    kind: str,
    generator: ModuleType,
    inputs: dict[str, np.ndarray],
    cotangents: dict[str, np.ndarray],
    labels: np.ndarray | None,
    exact: bool = False,
) -> tuple[dict[str, np.ndarray], Reference]:
    """A corpus case run and differentiated by PyTorch on one thread, at any size of its inputs: its outputs, and the
    gradients with the scalar that was differentiated as `loss`. A cotangent is rounded to the type of its output."""
    import torch

    model, outputs = run_model(case, generator, inputs, exact)
    if kind == "own":
        loss = outputs["loss"]
    elif kind == "vjp":
        seeds = {k: torch.from_numpy(np.asarray(c, np.float64 if exact else np.float32)) for k, c in cotangents.items()}
        loss = sum((outputs[k] * seed.to(outputs[k].dtype)).sum(dtype=seed.dtype) for k, seed in seeds.items())
    else:
        logits, wanted = outputs["logits"], torch.from_numpy(labels)
        if kind == "causal-lm":
            logits, wanted = logits[:, :-1], wanted[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORE)
    loss.backward()
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    grads: dict[str, np.ndarray] = {}
    aliases: dict[str, str] = {}
    for first, *others in names.values():
        parameter = parameters[first]
        grads[first] = as_array(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        aliases |= dict.fromkeys(others, first)
    found = {name: as_array(value) for name, value in outputs.items()}
    return found, Reference(grads, aliases, float(loss.detach()))


def compute(case: Case, kind: str, generator: ModuleType) -> Reference:
    """The gradients of a corpus case at its stored inputs, refused where PyTorch's outputs are not the stored ones.

    A half-precision case is differentiated in float64 as well, from the same rounded cotangents.
    """
    labels = case.labels() if kind in LABELLED else None
    inputs, cotangents = case.group("in"), case.group("cot")
    outputs, found = differentiate(case, kind, generator, inputs, cotangents, labels)
    agreement = tolerance.compare(outputs, case.group("out"))
    if not agreement.agrees:
        raise ValueError(f"{case.name}: PyTorch's outputs are not the stored ones: {agreement}")
    half = half_type(case)
    if half is None:
        return found
    rounded = {name: value.astype(half).astype(np.float64) for name, value in cotangents.items()}
    _, exact = differentiate(case, kind, generator, inputs, rounded, labels, exact=True)
    return replace(found, exact=exact.full)


def half_type(case: Case) -> np.dtype | None:
    """Returns the two-byte float type of the case's first float output, or `None`. For PyTorch's own formats the name
    of the case decides.
    """
    if case.model.suffix != ".onnx":
        words = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
        return next((np.dtype(kind) for word, kind in words.items() if case.name.endswith(word)), None)
    kinds = {onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16, onnx.TensorProto.FLOAT16: np.float16}
    outputs = onnx.load(case.model, load_external_data=False).graph.output
    found = [kinds[o.type.tensor_type.elem_type] for o in outputs if o.type.tensor_type.elem_type in kinds]
    return np.dtype(found[0]) if found else None


def stored_reference(case: Case, kind: str) -> Reference | None:
    """Returns full gradients from the case's own folder, or `None`."""
    has_own = "loss" in case.group("out")
    main = "own" if has_own else "vjp"
    path = case.folder / ("grads.npz" if kind == main else f"grads_{kind.replace('-', '_')}.npz")
    if not path.is_file():
        return None
    exact = case.folder / "grads_f64.npz"
    loss = case.arrays["out.loss"] if kind == "own" else case.arrays.get(f"loss.{kind.replace('-', '_')}")
    return Reference(
        full=dict(np.load(path)),
        aliases=json.loads((case.folder / "aliases.json").read_text()),
        exact=dict(np.load(exact)) if exact.is_file() and kind == main else None,
        loss=None if loss is None else float(loss),
    )


def stored_sums(case: Case) -> dict[str, dict] | None:
    """Returns the vjp record of grads.json. A parameter without a gradient counts as zero and is left out."""
    path = case.folder / "grads.json"
    if not path.is_file():
        return None
    return {k: v for k, v in json.loads(path.read_text())["grads"].items() if v is not None}


def reference(case: Case, kind: str, generator: ModuleType | None, cache: Path) -> Reference | None:
    """Returns the best available reference for this gradient, or `None`."""
    stored = stored_reference(case, kind)
    if stored or generator is None:
        return stored
    key = hashlib.sha256((case.folder / "case.npz").read_bytes()).hexdigest()[:16]
    path = cache / f"{case.name}-{kind}-{key}.npz"
    if path.is_file():
        full = dict(np.load(path))
        loss, aliases = float(full.pop("#loss")), json.loads(str(full.pop("#aliases")))
        exact = {name[len(EXACT) :]: full.pop(name) for name in list(full) if name.startswith(EXACT)}
        return Reference(full, aliases, None if kind == "vjp" else loss, exact or None)
    computed = compute(case, kind, generator)
    sums = stored_sums(case)
    if kind == "vjp" and sums:
        agreement = tolerance.compare_sums(computed.full, sums)
        if not agreement.agrees:
            raise ValueError(f"{case.name}: recomputed gradients disagree with grads.json: {agreement}")
    cache.mkdir(parents=True, exist_ok=True)
    extra = {"#loss": np.float64(computed.loss), "#aliases": np.str_(json.dumps(computed.aliases))}
    extra |= {EXACT + name: value for name, value in (computed.exact or {}).items()}
    np.savez_compressed(path, **computed.full, **extra)
    return computed if kind != "vjp" else replace(computed, loss=None)
