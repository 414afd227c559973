"""Packs the kit: the binary, this program, fixtures, and models without weights together with their solved plans."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
from pathlib import Path

from tools.cuda import models
from tools.cuda.models import MODELS, NAMES, PEAK, PLANS, SMALL, WHOLE_STEPS, Model
from tools.lib.compiler import Compiler
from tools.lib.options import FIXTURES, ROOT, dim_options

CARRIED = ("tools/__init__.py", "tools/cuda-checks", "tools/cuda/*.py", "tools/lib/*.py", "src/python/ckpt_opt/*.py")
CARRIED_FIXTURES = ("gpt2", "bert", "llama32", "llama32_mask", "llama32_bf16")
MOST_BYTES = 64 << 20
PLANNED_FOR = ("--device-profile", "h200")
PLAN_TIMEOUT_S = 3600.0
STACK_TRACE = "pkg.torch.onnx.stack_trace"
REPORTED = ("peak_before_bytes", "peak_after_bytes", "static_bytes", "overhead_pct", "outside_peak_bytes", "segments")
"""What the kit keeps of a plan's report."""


def pack(binary: Path, kit: Path, small: bool) -> None:
    """Makes the kit in a new folder; `small` takes fixtures as models."""
    if kit.exists():
        raise SystemExit(f"cuda-checks: {kit} is there already; name a new folder")
    (kit / "bin").mkdir(parents=True)
    shutil.copy2(binary, kit / "bin" / "ckpt-opt")
    for pattern in CARRIED:
        for file in sorted(ROOT.glob(pattern)):
            target = kit / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    for name in CARRIED_FIXTURES:
        (kit / "fixtures" / name).mkdir(parents=True)
        for part in ("model.onnx", "case.npz"):
            shutil.copy2(FIXTURES / name / part, kit / "fixtures" / name / part)
    compiler = Compiler(binary, PLAN_TIMEOUT_S)
    described = {
        model.name: packed(compiler, model, kit / "models" / model.name) for model in (SMALL if small else MODELS)
    }
    about = {"packed": str(datetime.date.today()), "commit": commit(), "small": small, "models": described}
    (kit / "kit.json").write_text(json.dumps(about, indent=1) + "\n")
    size = sum(file.stat().st_size for file in kit.rglob("*") if file.is_file())
    print(f"{kit}: {size / 2**20:.1f} MiB")
    # A dry run may pack a binary for debugging.
    if size > MOST_BYTES and not small:
        raise SystemExit(f"cuda-checks: the kit has {size} bytes, expected at most {MOST_BYTES}")


def commit() -> str:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def packed(compiler: Compiler, model: Model, folder: Path) -> dict:
    """Writes a model without weights and its training graphs, and returns what the kit says of them."""
    folder.mkdir(parents=True)
    whole = folder / "whole.onnx"
    if model.fixture:
        shutil.copy2(FIXTURES / model.fixture / "model.onnx", whole)
    else:
        # Only here: neither the target nor a dry run needs PyTorch to pack.
        from tools.lib import models as modules

        modules.export(modules.build(model.module, modules.DTYPES[model.dtype]), whole)
    exported = folder / "model.onnx"
    classes = without_weights(compiler, whole, exported)
    for file in folder.glob("whole.onnx*"):
        file.unlink()
    effort = ["--effort", "first"] if model.fixture else []
    chosen = ["--loss", "causal-lm", "--drop-output", "logits", *dim_options(model.dims), *PLANNED_FOR, *effort]
    full = compiler.call_json("plan", exported, "--policy", "full", *chosen)
    plans = {}
    wanted = PLANS | (WHOLE_STEPS if model.name == NAMES[0] else {})
    for name, options in wanted.items():
        words = [str(full["peak_after_bytes"]) if word == PEAK else word for word in options]
        report = compiler.call_json(exported, "-o", folder / f"{name}.onnx", *words, *chosen)
        plans[name] = {"options": words} | {key: report[key] for key in REPORTED}
        print(f"{model.name}, {name}: peak {report['peak_after_bytes'] / 2**20:.1f} MiB", flush=True)
    return {"module": model.module, "dtype": model.dtype, "dims": model.dims, "classes": classes, "plans": plans}


def without_weights(compiler: Compiler, whole: Path, target: Path) -> int:
    """Writes a model whose parameters lie in a weight file that is not there, and the table of that file.

    Constants stay in the model. Returns the number of classes.
    """
    import onnx

    table = compiler.inspect(whole)
    parameters = {entry["initializer"]: entry for entry in table["parameters"]}
    proto = onnx.load(str(whole), load_external_data=False)
    stored = [tensor.name for tensor in proto.graph.initializer]
    if missing := sorted(parameters.keys() - set(stored)):
        raise SystemExit(f"cuda-checks: {whole} has no initializer for the parameters {', '.join(missing)}")
    keys = ("initializer", "name", "aliases", "transposed", "dtype", "shape")
    entries = [{key: parameters[name][key] for key in keys} for name in stored if name in parameters]
    models.place(entries)
    places = {entry["initializer"]: entry for entry in entries}
    for tensor in proto.graph.initializer:
        entry = places.get(tensor.name)
        if entry is None:
            if onnx.external_data_helper.uses_external_data(tensor):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(whole.parent))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
            continue
        # The initializer's own layout; `inspect` gives the framework's.
        entry["shape"] = list(tensor.dims)
        for field in ("raw_data", "float_data", "int32_data", "external_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", models.WEIGHTS), ("offset", entry["offset"]), ("length", entry["bytes"])):
            tensor.external_data.add(key=key, value=str(value))
    for node in proto.graph.node:
        kept = [prop for prop in node.metadata_props if prop.key != STACK_TRACE]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    target.write_bytes(proto.SerializeToString())
    (target.parent / models.TABLE).write_text(json.dumps(entries))
    return int(table["outputs"][0]["shape"][-1])
