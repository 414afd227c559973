"""Measures every `--offload` mode at the same budgets, beside what the plan predicts.

    python tools offload --ckpt-opt BINARY MODEL [--budgets 80%,60%,40%] [--modes none,auto,half,cpu,disk,block-inputs]
        [--effort first] [--threads 2] [--rounds 5] [--steps 3] [--repeats 0] [--folder DIR] [--page FILE.md]
        [-- options of `optimize`, such as --loss causal-lm --dim batch=2 --dim seq=64 --drop-output logits]

Plans use the times of this machine, which `calibrate` measures first (kept in --folder). For each budget and mode one
training graph is written, and run with overlapped transfers and with transfers in sequence. The table lists predicted
and measured step time (medians over the rounds, wall time and CPU time), predicted and measured peak, and the most bytes
that were offloaded at once. Each round runs every graph in turn, so that other load affects all of them alike. `none` runs
twice in every round; the difference between its two runs is the noise of the machine.

`half` is `auto` with a host budget of half the bytes that `auto` offloads.

Exit code 1 if
  predicted   the plan predicts that `auto` or `half` takes longer than `none` at the same budget
  measured    `auto` or `half` takes longer than `none` in wall time: the median over the rounds of its ratio to the two
              runs of `none` exceeds the largest ratio of those two
  peak        a measured peak differs from the predicted one, or exceeds the budget
  outside     more bytes are offloaded than predicted, or than the host budget allows
  bits        an output differs in any bit from that of `none` at the first budget, also in --repeats further runs
  refused     `auto` is refused where `none` is not, or `none` is refused
  files       the folder of offloaded tensors is not empty afterwards
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from tools.lib import options, page
from tools.lib.compiler import Compiler, Refused, sha256_of

MODES = ("none", "auto", "half", "cpu", "disk", "block-inputs")
AGAIN = "none, again"
STREAMS = ("on", "off")
PLANNED = ("auto", "half")
"""Modes that promise to be no slower than `none`."""


@dataclass
class Made:
    """A training graph with what its plan predicts."""

    budget: str
    mode: str
    path: Path
    budget_bytes: int
    host_bytes: int | None
    predicted_us: float
    peak_bytes: int
    offloaded: int
    runs: dict[str, list[dict]] = field(default_factory=dict)
    """Reports of `run`, one a round, by whether transfers run beside other nodes."""

    @property
    def label(self) -> str:
        return f"{self.budget} {self.mode}"

    def times(self, streams: str, key: str) -> list[float]:
        return [report[key] for report in self.runs[streams]]


@dataclass
class Bench:
    args: argparse.Namespace
    compiler: Compiler
    folder: Path
    options: tuple[str, ...]
    sizes: tuple[str, ...]
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first_digest: str | None = None

    def made(self, budget: str, mode: str, host_bytes: int | None = None) -> Made | None:
        """Writes the graph of one mode; `None`, with a note, if it is refused."""
        path = self.folder / f"{budget.rstrip('%')}-{mode}.onnx"
        plan_path = path.with_suffix(".plan.json")
        word = "auto" if mode == "half" else mode
        room = ("--host-budget", str(host_bytes)) if host_bytes is not None else ()
        try:
            report = self.compiler.call_json(
                self.args.model, "-o", path, "--budget", budget, "--offload", word, "--effort", self.args.effort,
                "--device-profile", self.compiler.calibrated(self.folder, self.args.threads), "--plan-out", plan_path, *room, *self.options,
            )  # fmt: skip
        except Refused as refused:
            self.notes.append(f"{budget} {mode}: {refused}")
            return None
        plan = json.loads(plan_path.read_text())
        return Made(budget, mode, path, report["budget_bytes"], host_bytes, plan["after"]["cost"],
                    report["peak_after_bytes"], report["offloaded"])  # fmt: skip

    def run(self, made: Made, streams: str, *more: str | Path) -> dict:
        # The first step warms up, and a median of an even number is the upper one.
        return self.compiler.call_json(
            "run", made.path, "--seed", "1", *self.sizes, "--threads", str(self.args.threads), "--async-transfers", streams,
            "--steps", str(self.args.steps + 1), "--offload-dir", self.folder / "outside", *more,
        )  # fmt: skip

    def same_bits(self, made: Made, streams: str) -> None:
        outputs = self.folder / "outputs.safetensors"
        self.run(made, streams, "--outputs", outputs)
        digest = sha256_of(outputs)
        self.first_digest = self.first_digest or digest
        if digest != self.first_digest:
            self.wrong.append(f"bits: {made.label}, streams {streams}: outputs are not those of the first plan")

    def judge(self, made: Made) -> None:
        for streams, reports in made.runs.items():
            for report in reports:
                peak, outside = report["measured_peak_bytes"], report["outside_peak_bytes"]
                if peak != report["predicted_peak_bytes"] or peak != made.peak_bytes or peak > made.budget_bytes:
                    self.wrong.append(
                        f"peak: {made.label}, streams {streams}: {peak} B measured, {report['predicted_peak_bytes']} predicted "
                        f"for the file, {made.peak_bytes} planned, a budget of {made.budget_bytes}"
                    )
                    break
                if outside > report["predicted_outside_bytes"] or outside > (made.host_bytes or outside):
                    self.wrong.append(
                        f"outside: {made.label}, streams {streams}: {outside} B measured, {report['predicted_outside_bytes']} "
                        f"predicted, {made.host_bytes or 'any number'} allowed"
                    )
                    break

    def budget(self, budget: str) -> list[Made]:
        found: dict[str, Made] = {}
        for mode in (mode for mode in MODES if mode in self.args.modes):
            host_bytes = None
            if mode == "half":
                if "auto" not in found or found["auto"].offloaded == 0:
                    continue
                host_bytes = self.run(found["auto"], "on")["outside_peak_bytes"] // 2
            made = self.made(budget, mode, host_bytes)
            if made is not None:
                found[mode] = made
        none = found.get("none")
        if none is None:
            self.wrong.append(f"refused: {budget}: there is nothing to compare with")
            return []
        for mode in PLANNED:
            made = found.get(mode)
            if made is None and mode == "auto" and mode in self.args.modes:
                self.wrong.append(f"refused: {budget} {mode}, not none")
            # One plan may be judged twice with its sums in another order.
            if made is not None and made.predicted_us > none.predicted_us * (1 + 1e-9):
                self.wrong.append(
                    f"predicted: {made.label}: {made.predicted_us:.0f} us, without transfers {none.predicted_us:.0f}"
                )
        everything = [
            (made, streams) for made in found.values() for streams in STREAMS if made.offloaded or streams == "on"
        ]
        for made, streams in everything:
            for _ in range(1 + self.args.repeats):
                self.same_bits(made, streams)
        for _ in range(self.args.rounds):
            for made, streams in everything:
                made.runs.setdefault(streams, []).append(self.run(made, streams))
            none.runs.setdefault(AGAIN, []).append(self.run(none, "on"))
        for made in found.values():
            self.judge(made)
            if made.mode in PLANNED:
                self.compare(made, none)
            made.path.unlink()
        return list(found.values())

    def compare(self, made: Made, none: Made) -> None:
        """Checks whether a plan is slower than offloading nothing, by more than the noise."""
        for streams in made.runs:
            (ratio, noise), (cpu_ratio, cpu_noise) = (
                against(made.times(streams, key), none.times("on", key), none.times(AGAIN, key))
                for key in ("step_time_us", "step_cpu_us")
            )
            said = (
                f"{made.label}, streams {streams}: {ratio:.3f} of none in time that passes, noise {noise:.3f}; "
                f"{cpu_ratio:.3f} in CPU time, noise {cpu_noise:.3f}"
            )
            self.notes.append(said)
            # A plan for transfers that hide says nothing about a run where they do not.
            if streams == "on" and ratio > noise:
                self.wrong.append(f"measured: {said}")


def against(own: list[float], first: list[float], again: list[float]) -> tuple[float, float]:
    """Returns the median ratio of a plan's times to those of another plan that ran twice, and the largest ratio between
    these two runs.
    """
    ratios = [2 * o / (a + b) for o, a, b in zip(own, first, again, strict=True)]
    noise = max(max(a / b, b / a) for a, b in zip(first, again, strict=True))
    return statistics.median(ratios), noise


HEAD = """| budget | offload | ops moved | streams | ms by the plan | ms | CPU ms | peak MiB by the plan | peak MiB | outside MiB | host budget MiB |
|---|---|---|---|---|---|---|---|---|---|---|"""


def rows(made: Made) -> list[str]:
    lines = []
    for streams in made.runs:
        last = made.runs[streams][-1]
        wall, cpu = (statistics.median(made.times(streams, key)) / 1e3 for key in ("step_time_us", "step_cpu_us"))
        room = f"{made.host_bytes / 2**20:.1f}" if made.host_bytes is not None else ""
        mode = AGAIN if streams == AGAIN else made.mode
        lines.append(
            f"| {made.budget} | {mode} | {made.offloaded} | {streams if made.offloaded else ''} | {made.predicted_us / 1e3:.1f} "
            f"| {wall:.1f} | {cpu:.1f} | {made.peak_bytes / 2**20:.2f} | {last['measured_peak_bytes'] / 2**20:.2f} "
            f"| {last['outside_peak_bytes'] / 2**20:.1f} | {room} |"
        )
    return lines


def main() -> int:
    words, planning = options.split_at_dashes()
    planning = planning or []
    parser = options.with_binary(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--budgets", default="80%,60%,40%")
    parser.add_argument("--modes", type=options.words_of(MODES), default=list(MODES))
    parser.add_argument("--effort", default="first")
    options.add_counts(parser, threads=2, rounds=5, steps=3, repeats=0)
    parser.add_argument("--folder", type=Path, help="keep the device's profile here, and take it from here")
    options.add_page(parser)
    args = parser.parse_args(words)
    compiler = Compiler(args.ckpt_opt, 7200.0)
    sizes = tuple(word for i, name in enumerate(planning) if name == "--dim" for word in planning[i : i + 2])
    lines = [
        page.head(
            platform.machine(), args.threads, f"{args.model.stem} {' '.join(planning)}",
            f"{args.rounds} rounds of {args.steps} steps", f"--effort {args.effort}", page.load(),
        ), "", HEAD,
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    with options.folder_or_scratch(args.folder) as folder:
        (folder / "outside").mkdir(exist_ok=True)
        bench = Bench(args, compiler, folder, tuple(planning), sizes)
        for budget in args.budgets.split(","):
            for made in bench.budget(budget):
                found = rows(made)
                print("\n".join(found), flush=True)
                lines += found
        if any((folder / "outside").iterdir()):
            bench.wrong.append("files: something is left of what waited")
    return page.finish("What offloading is worth", lines, bench.notes, bench.wrong, args.page)
