"""What a step works with: the kit, the binary, folders, the device, and where results go."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tools.cuda.records import Records
from tools.lib.compiler import Compiler
from tools.lib.options import dim_options

TORCH_VERSION = "2.11.0"
ENVIRONMENT = "environment.json"
NO_LIMIT_S = 3600.0
"""Calls of the binary end with their step."""
PREFIX = "model."
"""`tools/lib/models.py` exports parameters with this before their names."""


class Skipped(Exception):
    """A step that a dry run cannot do on this machine."""


def torch_folder() -> Path | None:
    """Returns the folder of this Python's torch, without importing it."""
    found = importlib.util.find_spec("torch")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def lacks_peers() -> str:
    """Returns why steps cannot run PyTorch, or an empty text."""
    lacking = [name for name in ("torch", "transformers", "onnx") if importlib.util.find_spec(name) is None]
    return f"this Python has no {', '.join(lacking)}" if lacking else ""


def torch_version() -> str:
    folder = torch_folder()
    if folder is None:
        return "none"
    lines = (folder / "version.py").read_text().splitlines()
    return next((line.split("=")[1].strip(" '\"") for line in lines if line.startswith("__version__")), "unknown")


def library_folders() -> list[Path]:
    """Returns where pip has put libtorch and the CUDA libraries; none for another version of torch."""
    folder = torch_folder()
    if folder is None or torch_version().split("+")[0] != TORCH_VERSION:
        return []
    return [folder / "lib", *sorted((folder.parent / "nvidia").glob("*/lib"))]


def use_libraries() -> None:
    """Lets the binary, which this process starts, find pip's libraries."""
    known = os.environ.get("LD_LIBRARY_PATH")
    if folders := [*map(str, library_folders()), *([known] if known else [])]:
        os.environ["LD_LIBRARY_PATH"] = ":".join(folders)


@dataclass
class Context:
    root: Path
    out: Path
    work: Path
    device: str
    step: str
    about: dict = field(init=False)
    records: Records = field(init=False)
    compiler: Compiler = field(init=False)

    def __post_init__(self) -> None:
        self.about = json.loads((self.root / "kit.json").read_text())
        self.records = Records(self.out, self.step)
        self.compiler = Compiler(self.root / "bin" / "ckpt-opt", NO_LIMIT_S)
        use_libraries()
        chosen = self.work / ENVIRONMENT
        if chosen.exists():
            os.environ.update(json.loads(chosen.read_text()))

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    @cached_property
    def folder(self) -> Path:
        """A folder of this step's own."""
        path = self.work / "steps" / self.step.replace(" ", "-")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fixture(self, name: str) -> Path:
        return self.root / "fixtures" / name / "model.onnx"

    def feed(self, name: str) -> list[str | Path]:
        """Returns the options that feed a fixture; half precision has no labels in its case."""
        if name.endswith("bf16"):
            return ["--seed", "1", *dim_options({"batch": 2, "seq": 16})]
        return ["--seed", "1", "--inputs", self.root / "fixtures" / name / "case.npz"]

    def train(self, name: str, label: str, *options: str) -> Path:
        """Writes a training graph of a fixture."""
        loss = "cross-entropy" if name == "bert" else "causal-lm"
        made = self.folder / f"{name}.{label}.onnx"
        self.compiler.call(self.fixture(name), "-o", made, "--loss", loss, *options)
        return made

    def run(self, case: str, graph: Path, feed: Sequence[str | Path], *options: object) -> dict:
        """Runs a graph on the device, and records its figures and whether its memory is the predicted one."""
        report = self.compiler.call_json("run", graph, *feed, "--device", self.device, *map(str, options))
        self.records.figures(
            case,
            steps_us=[step["time_us"] for step in report["steps"]],
            predicted_bytes=report["predicted_requested_bytes"],
            requested_bytes=report["requested_peak_bytes"],
            predicted_allocated_bytes=report["predicted_peak_bytes"],
            allocated_bytes=report["measured_peak_bytes"],
            reserved_bytes=report["reserved_bytes"],
            workspace_bytes=report["workspace_bytes"],
            static_bytes=report["static_bytes"],
            outside_bytes=report["outside_peak_bytes"],
            replayed_steps=report["replayed_steps"],
            attention=report["attention"],
            warnings=report["warnings"],
        )
        predicted, requested = report["predicted_requested_bytes"], report["requested_peak_bytes"]
        fits = requested <= predicted if report["peak_is_bound"] else requested == predicted
        found = f"{predicted} bytes predicted, {requested} requested"
        self.records.condition(f"{case}: requested memory is the predicted one", fits, found)
        return report

    def replayed(self, case: str, report: dict) -> None:
        """Records whether all steps were replayed as CUDA graphs; a CPU has none."""
        done, asked = report["replayed_steps"], 0 if self.dry else len(report["steps"])
        self.records.condition(f"{case}: all steps are replayed", done == asked, f"{done} of {asked}")

    def same(self, what: str, a: Path, b: Path) -> None:
        """Records whether two files of results hold the same bytes."""
        missing = [path.name for path in (a, b) if not path.exists()]
        self.records.condition(what, not missing and equal(a, b), f"{', '.join(missing)} is missing" if missing else "")


def equal(a: Path, b: Path) -> bool:
    """Compares files byte for byte."""
    size = 1 << 24
    with a.open("rb") as left, b.open("rb") as right:
        while chunk := left.read(size):
            if chunk != right.read(size):
                return False
        return not right.read(1)
