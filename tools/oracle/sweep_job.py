"""One model of the sweep: builds it, differentiates it with PyTorch, exports it, and compares what ckpt-opt makes of the file.

Each export runs in a process of its own, which a time limit may end; memory is limited for all of them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch.onnx import symbolic_helper, symbolic_opset11

from tools.lib import matching, tolerance
from tools.lib.compiler import Compiler, Refused, read_tensors, write_tensors
from tools.lib.feeds import COTANGENT, SEED
from tools.lib.model_inputs import Maker, Sizes
from tools.lib.onnx_runtime import OPTIMISED, UNOPTIMISED, run_ort, session_of
from tools.lib.reference import Reference, as_array, stored_tensors
from tools.lib.zoo import Architecture, Unbuilt

SUFFIX = {"pt2": ".pt2", "onnx": ".onnx", "onnx-raw": ".onnx", "onnx-legacy": ".onnx", "traced": ".pt"}
FORMATS = tuple(SUFFIX)
COLUMNS = ("exported", "imported", "gradients", "planned", "peak")
OPSET = 17
"""That of the TorchScript exporter's files."""
TIES = "equal values compete"
"""Of the warning that a run gives where PyTorch may choose otherwise."""
RUNTIME = "onnxruntime"
"""The column of `--onnxruntime`."""
EXPORTED = Sizes(2, 8)
OTHER = Sizes(3, 11)
ONLY_BATCH = Sizes(3, 8)
ONLY_SEQ = Sizes(2, 11)
BUDGET = "budget:50%"
LARGEST = 64
"""The largest number of a size that only data decides, where its op tells none."""
CAUSE_LETTERS = 160
PATIENCE = 10
"""How many seconds may pass for a second of CPU time, on a machine that has other work."""
Tensors = dict[str, np.ndarray]
Row = dict[str, Any]


class Deviates(Exception):
    """An exported program computes something else than its model."""


class Wrapper(torch.nn.Module):
    """A model as a function from named tensors to all its outputs that are differentiable."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.kept: list[int] | None = None
        """The places of the outputs with a gradient, each tensor once; found by the first call."""
        taken = inspect.signature(model.forward).parameters
        fixed: dict[str, Any] = {k: v for k, v in {"use_cache": False, "return_dict": True}.items() if k in taken}

        def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = list(floats_in(model(**dict(zip(names, args)), **kwargs, **fixed)))
            if self.kept is None:
                first = {id(tensor): i for i, tensor in reversed(list(enumerate(found)))}
                self.kept = sorted(i for i in first.values() if found[i].requires_grad)
            return tuple(found[i] for i in self.kept)

        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        self.forward = forward


def floats_in(answer: Any) -> Iterator[torch.Tensor]:
    """Yields all floating-point tensors of an output, in their order."""
    if isinstance(answer, torch.Tensor):
        if answer.is_floating_point():
            yield answer
    elif isinstance(answer, (dict, list, tuple)):
        for part in answer.values() if isinstance(answer, dict) else answer:
            yield from floats_in(part)


@dataclass
class Truth:
    """What PyTorch computes at one pair of sizes."""

    inputs: dict[str, torch.Tensor]
    outputs: list[np.ndarray]
    cotangents: list[np.ndarray]
    reference: Reference
    exact: Truth | None = None
    """The same in float64, if the model runs in it."""


@dataclass
class Subject:
    """A small model that runs and has gradients."""

    architecture: Architecture
    model: Wrapper
    variant: str
    at: dict[Sizes, Truth] = field(default_factory=dict)

    def inputs(self, sizes: Sizes) -> dict[str, torch.Tensor]:
        """Returns inputs of the same kind as those at `EXPORTED`; raises `ValueError` if there are none at other sizes."""
        if sizes in self.at:
            return self.at[sizes].inputs
        want = self.at[EXPORTED].inputs
        for made in Maker(self.model.model, sizes, self.architecture.group).candidates():
            alike = list(made) == list(want) and all(made[n].dim() == want[n].dim() for n in made)
            if alike and runs(self.model, made):
                return made
        raise ValueError(f"the model has no inputs at {sizes}")

    def differentiate_at(self, several: Iterable[Sizes]) -> None:
        """Computes PyTorch's gradients at these sizes, as far as the model has inputs there.

        This happens before processes are forked: PyTorch differentiates in a process or in those forked from it, not in both.
        """
        for sizes in several:
            try:
                truth = differentiate(self.model, self.inputs(sizes))
            except (
                Exception
            ):  # whatever a model has against these sizes, its file is then checked at those of the export
                continue
            with contextlib.suppress(Exception):
                wide = copy.deepcopy(self.model.model).double()
                inputs = {n: v.double() if v.is_floating_point() else v for n, v in truth.inputs.items()}
                truth.exact = differentiate(Wrapper(wide, list(inputs)), inputs, truth.cotangents)
            self.at[sizes] = truth

    def varying(self) -> dict[str, dict[int, str]]:
        """Returns the axes of each input that depend on batch or length, with a name for each size."""
        base = self.inputs(EXPORTED)
        found: dict[str, dict[int, str]] = {name: {} for name in base}
        for word, sizes in (("batch", ONLY_BATCH), ("seq", ONLY_SEQ)):
            with contextlib.suppress(ValueError):
                for name, other in self.inputs(sizes).items():
                    for axis, (a, b) in enumerate(zip(base[name].shape, other.shape)):
                        if a != b:
                            own = getattr(EXPORTED, word)
                            found[name][axis] = word if a == own else f"{word}{a}"
        return found


def runs(model: Wrapper, inputs: dict[str, torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            model.model(**inputs)
    except Exception:
        return False
    return True


def subjects_of(architecture: Architecture) -> Iterator[Subject]:
    """Yields the first small model that runs on inputs that we can make and has gradients, then the same with text only."""
    reasons = []
    for model, variant in architecture.candidates():
        for inputs in Maker(model, EXPORTED, architecture.group).candidates():
            wrapper = Wrapper(model, list(inputs))
            try:
                truth = differentiate(wrapper, inputs)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            yield Subject(architecture, wrapper, variant, {EXPORTED: truth})
            if "input_ids" in inputs and any(value.dim() > 2 for value in inputs.values()):
                yield from text_only(architecture, model, variant)
            return
    raise Unbuilt(reasons[0] if reasons else "no inputs fit")


def text_only(architecture: Architecture, model: torch.nn.Module, variant: str) -> Iterator[Subject]:
    for inputs in Maker(model, EXPORTED, architecture.group).with_text({}):
        wrapper = Wrapper(model, list(inputs))
        with contextlib.suppress(Exception):
            truth = differentiate(wrapper, inputs)
            yield Subject(architecture, wrapper, f"{variant}, text only", {EXPORTED: truth})
            return


def differentiate(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    cotangents: list[np.ndarray] | None = None,
    by_name: bool = True,
) -> Truth:
    """Runs a model and computes the gradients of Σ output · cotangent, by random cotangents or given ones."""
    forget_caches(model)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    given = {name: value.clone() for name, value in inputs.items()}
    outputs = model(**given) if by_name else model(*given.values())
    if not outputs:
        raise ValueError("no output has a gradient")
    rng = np.random.default_rng(3)
    if cotangents is None:
        cotangents = [(rng.standard_normal(o.shape) / max(o.numel(), 1) ** 0.5).astype(np.float32) for o in outputs]
    seeds = [torch.from_numpy(c).to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)]
    torch.autograd.backward(list(outputs), seeds)
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    gradients: Tensors = {}
    aliases: dict[str, str] = {}
    for first, *others in names.values():
        gradient = parameters[first].grad
        gradients[first] = as_array(torch.zeros_like(parameters[first]) if gradient is None else gradient)
        aliases |= dict.fromkeys(others, first)
    if not any(np.any(g) for g in gradients.values()):
        raise ValueError("no parameter has a gradient")
    arrays = [as_array(o) for o in outputs]
    if not all(np.isfinite(a).all() for a in [*arrays, *gradients.values()]):
        raise ValueError("PyTorch's outputs or gradients are not finite")
    return Truth(inputs, arrays, cotangents, Reference(gradients, aliases))


def forget_caches(model: torch.nn.Module) -> None:
    """Empties what timm's attention computes from a parameter once and keeps in evaluation.

    An export made afterwards would hold it as a constant, without the parameter.
    """
    for module in model.modules():
        cache = getattr(module, "attention_bias_cache", None)
        if isinstance(cache, dict):
            cache.clear()


def gradients_of_program(path: Path, inputs: Tensors, cotangents: list[np.ndarray]) -> Tensors:
    """Returns the gradients that PyTorch computes for the exported or traced program in this file."""
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if path.suffix == SUFFIX["traced"]:
        return differentiate(torch.jit.load(path), tensors, cotangents, by_name=False).reference.full
    return differentiate(torch.export.load(path).module(), tensors, cotangents).reference.full


def export(subject: Subject, form: str, dynamic: bool, path: Path) -> Callable[..., Any] | None:
    """Writes the model as a file, and returns the exported program as a function, if PyTorch can run it."""
    inputs = subject.at[EXPORTED].inputs
    model = subject.model
    forget_caches(model)
    if form == "traced":
        traced = torch.jit.trace(model, tuple(inputs.values()), strict=False, check_trace=False)
        torch.jit.save(traced, path)
        return traced
    shapes = None
    if dynamic:
        auto = torch.export.Dim.AUTO
        shapes = {name: dict.fromkeys(axes, auto) for name, axes in subject.varying().items()}
    if form == "pt2":
        program = torch.export.export(model, (), kwargs=dict(inputs), dynamic_shapes=shapes, strict=False)
        torch.export.save(program, path)
        return program.module()
    if form == "onnx-legacy":
        names = {"input_names": list(inputs), "dynamic_axes": subject.varying() if dynamic else None}
        torch.onnx.register_custom_op_symbolic("aten::diff", difference, OPSET)
        torch.onnx.register_custom_op_symbolic("aten::cumsum", running_sum, OPSET)
        torch.onnx.export(model, tuple(inputs.values()), path, dynamo=False, opset_version=OPSET, **names)
        return None
    written = torch.onnx.export(
        model, (), kwargs=dict(inputs), dynamo=True, dynamic_shapes=shapes, optimize=form == "onnx", verbose=False
    )
    assert written is not None
    written.save(str(path))
    return None


def difference(g: Any, x: Any, count: Any, axis: Any, before: Any, after: Any) -> Any:
    """Writes `torch.diff` of first order for the TorchScript exporter, which lacks it; masks of transformers are made by it."""
    number = symbolic_helper._get_const
    if number(count, "i", "n") != 1:
        return symbolic_helper._unimplemented("diff", "a higher order")
    axis = number(axis, "i", "dim")
    parts = [part for part in (before, x, after) if not symbolic_helper._is_none(part)]
    whole = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x

    def part(first: int, last: int) -> Any:
        ends = (g.op("Constant", value_t=torch.tensor([n])) for n in (first, last, axis))
        return g.op("Slice", whole, *ends)

    return g.op("Sub", part(1, sys.maxsize), part(0, -1))


def running_sum(g: Any, x: Any, axis: Any, dtype: Any) -> Any:
    """Writes `torch.cumsum` of booleans as of integers, which the TorchScript exporter leaves out."""
    if symbolic_helper._is_bool(x):
        x = g.op("Cast", x, to_i=onnx.TensorProto.INT64)
    return symbolic_opset11.cumsum(g, x, axis, dtype)


def run_model(
    architecture: Architecture,
    jobs: list[tuple[str, bool]],
    binary: Path,
    onnx_runtime: bool,
    limits: tuple[float, int],
    to: Connection,
) -> None:
    """Checks one model in all formats, each in a process of its own. Sends one row for each, or one if there is no model.

    Where PyTorch cannot export a model with its images or sounds, the model is checked with text only.
    """
    limit(*limits)
    row: Row = {"model": architecture.name, "family": architecture.family, "group": architecture.group}
    several = (EXPORTED, OTHER, ONLY_BATCH, ONLY_SEQ) if any(dynamic for _, dynamic in jobs) else (EXPORTED,)
    try:
        with quiet():
            subjects = list(subjects_of(architecture))
            for subject in subjects:
                subject.differentiate_at(several)
    except Exception as error:
        words = str(error) if isinstance(error, Unbuilt) else f"{type(error).__name__}: {error}"
        to.send(row | {"format": "-", "sizes": "-", "cause": {"built": normalised(words)}, "detail": words[:400]})
        return
    to.send(row | {"format": "+", "sizes": "-"})
    for form, dynamic in jobs:
        for subject in subjects:
            inputs = {name: list(tensor.shape) for name, tensor in subject.at[EXPORTED].inputs.items()}
            count = len(subject.at[EXPORTED].reference.full)
            own = row | {"variant": subject.variant, "inputs": inputs, "parameters": count, "format": form}
            own |= {"sizes": "dynamic" if dynamic else "static"}
            found = in_process(partial(check, subject, form, dynamic, binary, onnx_runtime), own, limits[1])
            if found.get("exported") == "yes":
                break
        to.send(found)


def in_process(work: Callable[[Row, Connection], None], row: Row, seconds: int) -> Row:
    """Runs `work` in a forked process, which sends its row after every column; returns the last, with the reason if the
    process died.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def main() -> None:
        os.setsid()
        with quiet():
            work(row, theirs)

    process = context.Process(target=main)
    start = time.monotonic()
    process.start()
    theirs.close()
    last, reason = row, ""
    while not reason:
        left = start + PATIENCE * seconds - time.monotonic()
        if left <= 0 or not ours.poll(left):
            reason = f"no answer after {PATIENCE * seconds} s"
            break
        try:
            last = ours.recv()
        except EOFError:
            break
    if reason and process.pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if not reason and process.exitcode:
        over = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        reason = f"more than {seconds} CPU seconds" if over else f"the process ended with {process.exitcode}"
    if reason:
        column = next((c for c in COLUMNS if c not in last), "peak")
        last = last | {column: "no", "cause": last.get("cause", {}) | {column: reason}}
    return last | {"seconds": round(time.monotonic() - start, 1)}


def limit(gib: float, seconds: int) -> None:
    """Limits the memory and the CPU seconds of this process, and of each that it starts. Mapped files do not count."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), int(gib * 2**30)))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards what exporters print."""
    with (
        warnings.catch_warnings(),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield


def normalised(text: str) -> str:
    """Returns the first line of a message without what differs between models: names, numbers, addresses."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "…", line)
    line = re.sub(r"\?[\w.]+", "?…", line)
    line = re.sub(r"0x[0-9a-f]+|\b[su]\d+\b|\d+(\.\d+)?(e[-+]?\d+)?", "N", line)
    return line[:CAUSE_LETTERS]


@dataclass
class Check:
    """One file of one model."""

    subject: Subject
    form: str
    dynamic: bool
    compiler: Compiler
    folder: Path
    row: Row
    to: Connection | None = None
    """Takes the row after every column."""
    onnx_runtime: bool = False
    # Options that bound the sizes that only data decides.
    bounds: list[str] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / f"model{SUFFIX[self.form]}"

    def note(self, column: str, verdict: str, cause: str = "", detail: str = "") -> None:
        self.row[column] = verdict
        if cause:
            self.row.setdefault("cause", {})[column] = normalised(
                cause if verdict == "no" else re.split(": ", cause)[0]
            )
            self.row.setdefault("detail", {})[column] = (detail or cause)[:600]
        if self.to:
            self.to.send(self.row)

    def types(self) -> list[str]:
        """Returns the options that give a trace the types of its inputs."""
        if self.form != "traced":
            return []
        codes = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool", torch.int32: "i32", torch.float64: "f64"}
        varying = self.subject.varying() if self.dynamic else {}
        words = []
        for name, tensor in self.subject.at[EXPORTED].inputs.items():
            extents = [varying.get(name, {}).get(axis, str(n)) for axis, n in enumerate(tensor.shape)]
            words += ["--input", f"{name}:{codes[tensor.dtype]}[{','.join(extents)}]"]
        return words

    def accepted(self, call: Callable[..., Any], *words: Any) -> Any:
        """Calls the compiler. Where it asks for the largest number of a size that only data decides, gives one."""
        while True:
            try:
                return call(*words, *self.types(), *self.bounds)
            except Refused as refused:
                asked = re.search(r"--dim '(\?[^=']+)=N'", str(refused))
                if not asked or f"{asked[1]}={LARGEST}" in self.bounds:
                    raise
                self.bounds += ["--dim", f"{asked[1]}={LARGEST}"]

    def run(self) -> None:
        """Fills the columns in their order, until one fails that the next ones need."""
        try:
            program = self.export()
        except Exception as error:
            self.note("exported", "no", root_cause(error))
            return
        self.note("exported", "yes")
        try:
            table = self.accepted(self.compiler.call_json, "inspect", self.file)
            out = self.folder / "none.onnx"
            words = (self.file, "-o", out, "--policy", "none", "--loss", "vjp")
            report = self.accepted(self.compiler.call_json, *words)
        except Refused as refused:
            invalid = self.invalid() if self.form.startswith("onnx") else ""
            if invalid:
                self.note("exported", "no", "ONNX Runtime refuses the file too", invalid)
            elif not self.is_fixed_trace(program):
                self.note("imported", "no", code_and_line(refused), str(refused))
            return
        self.note("imported", "yes")
        sizes = self.sizes(table)
        truth = self.subject.at[sizes]
        feeds = self.feeds(table, truth)
        self.gradients(table, report, out, truth, feeds, program)
        if self.row["exported"] == "yes":
            self.plan(out, self.dims(table, truth))

    def export(self) -> Callable[..., Any] | None:
        """Exports the model; where that fails, without gradients, which selects other kernels, and then with a mixture of
        experts as batched products.
        """
        model = self.subject.model.model
        ways = ["", "no_grad", *(["batched_mm"] if has_experts(model) else [])]
        for way in ways:
            try:
                with torch.set_grad_enabled(not way):
                    if way == "batched_mm":
                        model.set_experts_implementation(way)
                    program = export(self.subject, self.form, self.dynamic, self.file)
            except Exception:
                if way == ways[-1]:
                    raise
                continue
            self.row["variant"] += f", {way}" if way else ""
            return program
        return None

    def invalid(self) -> str:
        """Returns what ONNX Runtime has against the file; nothing if it loads it."""
        try:
            session_of(self.file)
        except Exception as error:
            return str(error)
        return ""

    def sizes(self, table: dict) -> Sizes:
        """Returns sizes that differ from those of the export in every axis that the file leaves open."""
        if not self.dynamic:
            return EXPORTED
        shapes = {entry["name"]: entry["shape"] for entry in table["inputs"]}
        closed = set()
        for name, axes in self.subject.varying().items():
            for axis, word in axes.items():
                if name in shapes and isinstance(shapes[name][axis], int):
                    closed.add("batch" if word.startswith("batch") else "seq")
        self.row["fixed"] = sorted(closed)
        sizes = Sizes(*(getattr(EXPORTED if word in closed else OTHER, word) for word in ("batch", "seq")))
        return sizes if sizes in self.subject.at else EXPORTED

    def feeds(self, table: dict, truth: Truth) -> Tensors:
        """Returns inputs under the file's names, and cotangents under those of its outputs."""
        names = [entry["name"] for entry in table["inputs"]]
        if not SEED.keys().isdisjoint(names):
            raise Deviates("the model draws random numbers, so no two runs of it agree")
        arrays = {name: as_array(value) for name, value in truth.inputs.items()}
        given = arrays if set(names) <= set(arrays) else dict(zip(names, arrays.values()))
        outputs = [entry["name"] for entry in table["outputs"]]
        if len(outputs) != len(truth.cotangents):
            raise Deviates(f"the file has {len(outputs)} outputs, the model {len(truth.cotangents)}")
        cotangents = {f"{name}{COTANGENT}": c for name, c in zip(outputs, truth.cotangents)}
        return {name: given[name] for name in names} | cotangents | SEED

    def dims(self, table: dict, truth: Truth) -> dict[str, int]:
        """Returns the numbers of the file's named sizes."""
        arrays = list(truth.inputs.values())
        known = {entry["name"]: truth.inputs.get(entry["name"], array) for entry, array in zip(table["inputs"], arrays)}
        pairs = [pair for entry in table["inputs"] for pair in zip(entry["shape"], known[entry["name"]].shape)]
        return {symbol: extent for symbol, extent in pairs if isinstance(symbol, str) and symbol.isidentifier()}

    def gradients(
        self, table: dict, report: dict, out: Path, truth: Truth, feeds: Tensors, program: Callable[..., Any] | None
    ) -> None:
        try:
            write_tensors(self.folder / "feeds.npz", feeds)
            answer = self.compiler.call_json(
                "run",
                out,
                "--inputs",
                self.folder / "feeds.npz",
                "--outputs",
                self.folder / "out.npz",
                "--threads",
                "1",
            )
            outputs = read_tensors(self.folder / "out.npz")
        except Refused as refused:
            if not self.is_other_program(program, truth, []):
                self.note("gradients", "no", code_and_line(refused), str(refused))
            return
        self.row["peaks"] = {"none": [answer["predicted_peak_bytes"], answer["measured_peak_bytes"]]}
        said = " ".join(map(str, [*table["warnings"], *report["warnings"]]))
        verdict, cause = self.judge(table, said, outputs, truth)
        if verdict in ("different", "no"):
            if self.is_other_program(program, truth, [outputs[entry["name"]] for entry in table["outputs"]]):
                return
            if exact := self.verdict_in_float64(truth):
                self.note("gradients", exact)
                return
            if self.form.startswith("onnx") and self.stops_gradients():
                self.note("exported", "no", "ONNX does not tell where gradients stop (detach, no_grad)", cause)
                return
            lost = self.lost_gradients(truth)
            if lost:
                self.note(
                    "exported", "no", "PyTorch differentiates the exported program otherwise than the model", lost
                )
                return
        if verdict == "different" and any(TIES in line for line in answer["warnings"]):
            verdict, cause = "warned", f"a choice among equal values, which a warning tells: {cause}"
        self.note("gradients", verdict, cause)

    def stops_gradients(self) -> bool:
        """Returns true if the model detaches tensors, or computes with parameters but without their gradients, which a file
        of ONNX cannot tell.
        """
        inputs = dict(self.subject.at[EXPORTED].inputs)
        program = torch.export.export(self.subject.model, (), kwargs=inputs, strict=False)
        parameters = set(program.graph_signature.inputs_to_parameters)

        def stops(node: torch.fx.Node) -> bool:
            target = str(node.target)
            reads = {operand.name for operand in node.all_input_nodes}
            return "aten.detach" in target or ("set_grad_enabled" in target and not reads.isdisjoint(parameters))

        return any(stops(node) for node in program.graph.nodes)

    def lost_gradients(self, truth: Truth) -> str:
        """Returns how the gradients of the exported program, by PyTorch, differ from the model's; nothing if they do not.

        A process of its own differentiates: autograd runs in none that was forked from one where it ran.
        """
        inputs = dict(truth.inputs)
        path = self.file
        arrays = {name: as_array(value) for name, value in inputs.items()}
        try:
            if self.form.startswith("onnx"):
                path = self.folder / "program.pt2"
                forget_caches(self.subject.model)
                torch.export.save(torch.export.export(self.subject.model, (), kwargs=inputs, strict=False), path)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found = pool.submit(gradients_of_program, path, arrays, truth.cotangents).result()
        except Exception:
            return ""
        worst = tolerance.compare(found, truth.reference.full, tolerance.largest(truth.reference.full))
        return "" if worst.agrees or (not worst.problem and worst.ratio < 10) else str(worst)

    def verdict_in_float64(self, truth: Truth) -> str:
        """Returns the verdict where the same model is exported and run in float64, if that is not wrong; else nothing.

        In float32 an activation that lies within rounding of a kink, as of a ReLU, takes either slope.
        """
        if truth.exact is None:
            return ""
        forget_caches(self.subject.model)
        wide = Wrapper(copy.deepcopy(self.subject.model.model).double(), list(truth.exact.inputs))
        wide.kept = self.subject.model.kept
        exact = replace(truth.exact, cotangents=[c.astype(np.float64) for c in truth.cotangents])
        subject = Subject(self.subject.architecture, wide, self.subject.variant, {EXPORTED: exact})
        folder = self.folder / "float64"
        folder.mkdir()
        check = Check(subject, self.form, False, self.compiler, folder, {"variant": ""}, bounds=self.bounds)
        check.run()
        self.row["float64"] = f"gradients in float64: {check.row.get('gradients', 'none')}"
        verdict = str(check.row.get("gradients", ""))
        return verdict if verdict in ("equal", "warned") else ""

    def judge(self, table: dict, said: str, outputs: Tensors, truth: Truth) -> tuple[str, str]:
        """Compares outputs and gradients with PyTorch's; returns a verdict and what is wrong."""
        names = [entry["name"] for entry in table["outputs"]]
        want = dict(zip(names, truth.outputs))
        forward = tolerance.compare(outputs, want)
        if not forward.agrees and not self.nearer(outputs, {}, truth, names):
            return "different", f"outputs differ: {forward}"
        # What holds a folded parameter has no name of PyTorch's, and a warning says so.
        trained = [entry for entry in table["parameters"] if entry["trainable"] and not entry["folded_from"]]
        by_name = matching.match(trained, truth.reference, None)
        found = by_name
        if self.form.startswith("onnx"):
            found = matching.match(trained, truth.reference, self.contents)

        def is_told(name: str) -> bool:
            modules = (name.rsplit(".", levels)[0] for levels in (1, 2, 3))
            return name in said or any(f"(module `{module}`)" in said for module in modules)

        missing = [name for name in found.missing if not is_told(name)]
        warned = [name for name in found.missing if is_told(name)]
        named, known = by_name.initializers(), found.initializers()
        split = [
            ", ".join(names)
            for pieces, names in found.groups
            if any(p.initializer in named for p in pieces) and any(p.initializer not in named for p in pieces)
        ]
        known |= set(found.buffers)
        frozen = {name for name, p in self.subject.model.named_parameters() if not p.requires_grad}
        strangers = [e["initializer"] for e in trained if e["initializer"] not in known and e["name"] not in frozen]
        strangers = [name for name in strangers if f"`{name}` (module" not in said]
        used = {name: value for name, value in outputs.items() if name.removesuffix(".grad") in known}
        try:
            ours, theirs = replace(found, table=[]).gradients(used, truth.reference.full)
        except ValueError as error:
            return "stranger" if "has no parameter for" in str(error) else "missing", str(error)
        # Axes of size 1 that a file cannot tell are named by a warning.
        for label in (n for n in ours if n in said and ours[n].size == theirs[n].size):
            if ours[label].shape != theirs[label].shape:
                ours[label] = ours[label].reshape(theirs[label].shape)
                warned.append(label)
        if ours:
            worst = tolerance.compare(ours, theirs, tolerance.largest(theirs))
            if not worst.agrees and not self.nearer(outputs, ours, truth, names):
                what = "a gradient has another shape" if "shape" in worst.problem else "gradients differ"
                return "different", f"{what}: {worst}"
        for verdict, wrong, words in (
            ("missing", missing, "parameters have no gradient, and no warning names them"),
            ("split", split, "parameters have copies that get part of the gradient"),
            ("stranger", strangers, "constants are trained that are no parameters of PyTorch's"),
            (
                "unnamed",
                [name for name in found.by_contents if not is_told(name)],
                "parameters have no name in the file, only their contents",
            ),
            ("warned", warned, "parameters have no gradient or an uncertain shape, and a warning names them"),
        ):
            if wrong:
                return verdict, f"{words}: {len(wrong)}, {', '.join(wrong[:4])}"
        return "equal", ""

    def contents(self) -> tuple[Tensors, Tensors]:
        """Returns the values of PyTorch's parameters and buffers, and of the file's initializers."""
        model = self.subject.model
        values = {name: as_array(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
        return values, stored_tensors(self.file)

    def nearer(self, outputs: Tensors, ours: Tensors, truth: Truth, names: list[str]) -> bool:
        """Returns true if our error against float64 is no larger than PyTorch's own: in each tensor, or in all of them
        together in float32.
        """
        exact = truth.exact
        if exact is None:
            return False
        if ours:
            wide, theirs = (
                {label: sum(of.reference.full[n] for n in label.split(" + ")) for label in ours}
                for of in (exact, truth)
            )
        else:
            ours, theirs, wide = outputs, dict(zip(names, truth.outputs)), dict(zip(names, exact.outputs))
        good = tolerance.compare_half(ours, theirs, wide, tolerance.root_mean_square)
        if not good.agrees and all(tensor.dtype == np.float32 for tensor in theirs.values()):
            good = tolerance.compare_pooled(ours, theirs, wide)
        self.row["float64"] = str(good)
        return good.agrees

    def is_fixed_trace(self, program: Callable[..., Any] | None) -> bool:
        """Returns true, and notes it, if a trace with named sizes computes the model at the traced sizes only."""
        truth = self.subject.at.get(OTHER)
        if self.form != "traced" or not self.dynamic or truth is None:
            return False
        return self.is_other_program(program, truth, truth.outputs)

    def is_other_program(self, program: Callable[..., Any] | None, truth: Truth, ours: list[np.ndarray]) -> bool:
        """Returns true, and notes it, if the exported program computes something else than the model."""
        deviation = self.deviation(program, truth, ours)
        if deviation:
            self.note("exported", "no", "the exported program computes something else than the model", deviation)
        return bool(deviation)

    def deviation(self, program: Callable[..., Any] | None, truth: Truth, ours: list[np.ndarray]) -> str:
        """Returns how the exported program differs from the model when PyTorch or ONNX Runtime runs it; else nothing.

        A small difference is the program's only if we differ from the model as that runtime does.
        """
        try:
            if program is not None:
                found = program(*truth.inputs.values()) if self.form == "traced" else program(**truth.inputs)
                arrays = [as_array(value) for value in found]
            else:
                arrays = list(run_ort(self.file, {n: as_array(v) for n, v in truth.inputs.items()}).values())
        except Exception as error:
            return "" if program is None else f"{type(error).__name__}: {error}"
        own, theirs, wanted = ({str(i): a for i, a in enumerate(of)} for of in (ours, arrays, truth.outputs))
        worst, alike = tolerance.compare(theirs, wanted), tolerance.compare(own, theirs)
        is_small = not worst.problem and worst.ratio < 10 and not alike.agrees
        return "" if worst.agrees or is_small else str(worst)

    def plan(self, plain: Path, dims: dict[str, int]) -> None:
        """Fills `planned` and `peak`: a plan within half the budget equals the unplanned graph bit for bit."""
        out, inputs = self.folder / "planned.onnx", self.folder / "feeds.npz"
        try:
            options = (*self.compiler.options, *self.types(), *self.bounds)
            Compiler(self.compiler.binary, self.compiler.timeout_s, options).optimize(
                self.file, out, BUDGET, "vjp", dims
            )
            self.compiler.call("verify", plain, out, "--inputs", inputs, "--threads", "1")
        except Refused as refused:
            self.note("planned", "no", code_and_line(refused), str(refused))
            return
        self.note("planned", "yes")
        try:
            answer = self.compiler.call_json("run", out, "--inputs", inputs, "--threads", "1")
        except Refused as refused:
            self.note("peak", "no", code_and_line(refused), str(refused))
            return
        peaks = self.row.setdefault("peaks", {})
        peaks["planned"] = [answer["predicted_peak_bytes"], answer["measured_peak_bytes"]]
        bound = bool(answer.get("peak_is_bound"))
        off = [
            k
            for k, (predicted, measured) in peaks.items()
            if predicted != measured and not (bound and measured < predicted)
        ]
        if off:
            self.note("peak", "no", f"predicted and measured peak differ ({', '.join(off)})", str(peaks))
            return
        self.note("peak", "yes")
        if self.onnx_runtime:
            self.run_elsewhere(out)

    def run_elsewhere(self, planned: Path) -> None:
        """Fills `onnxruntime`: it runs the planned file with its default optimization and with none, and agrees with us."""
        feeds, ours = read_tensors(self.folder / "feeds.npz"), read_tensors(self.folder / "out.npz")
        for level in (OPTIMISED, UNOPTIMISED):
            try:
                theirs = run_ort(planned, feeds, level)
            except Exception as error:
                self.note(RUNTIME, "no", f"{level.name}: {error}")
                return
            worst = tolerance.compare(theirs, ours, tolerance.largest(ours))
            if not worst.agrees:
                self.note(RUNTIME, "no", f"{level.name}: results differ", str(worst))
                return
        self.note(RUNTIME, "yes")


def has_experts(model: Any) -> bool:
    """Returns true for a model whose experts can be computed in several ways."""
    return any("expert" in name for name, _ in model.named_modules()) and hasattr(model, "set_experts_implementation")


def root_cause(error: BaseException) -> str:
    """Returns the error that exporters wrap in their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def code_and_line(refused: Refused) -> str:
    """Returns the error code and the first sentence of a refusal."""
    text = re.sub(r"^exit \d+: ", "", str(refused))
    found = re.search(r"(error|bug)\[[^\]]*\][^\n]*", text)
    line = found.group(0) if found else text
    return re.split(r" (?:at|expected|found|help): ", line)[0]


def check(
    subject: Subject, form: str, dynamic: bool, binary: Path, onnx_runtime: bool, row: Row, to: Connection
) -> None:
    """Checks one file and sends the row after every column."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(binary, timeout_s=600, options=("--effort", "first"))
        made = Check(subject, form, dynamic, compiler, Path(folder), dict(row), to, onnx_runtime)
        try:
            made.run()
        except Deviates as error:
            made.note("exported", "no", str(error))
        except Exception as error:  # a failed row is a row
            column = next((c for c in COLUMNS if c not in made.row), "peak")
            made.note(column, "no", f"{type(error).__name__}: {error}")
