"""Steps that judge the runtime on small graphs: bits, memory, kernels."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.cuda import context, models
from tools.cuda.context import Context, Skipped
from tools.lib import tolerance
from tools.lib.compiler import Refused, read_tensors
from tools.lib.options import dim_options

STEPS = 20
"""Steps in a row, of which the last one is compared."""

VERIFIED = (
    ("gpt2", "full", "auto"), ("gpt2", "selective", "tiles"), ("bert", "selective", "auto"), ("llama32", "full", "auto"),
    ("llama32", "submodule", "tiles"), ("llama32_mask", "full", "auto"), ("llama32_bf16", "full", "auto"),
    ("llama32_bf16", "selective", "tiles"),
)  # fmt: skip
"""Fixture, policy, and the kernels that attention may use."""


def environment(cx: Context) -> None:
    """Records the machine, and whether it has what the binary needs."""
    smi = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    version = context.torch_version()
    libraries = context.library_folders()
    machine = {
        "kit": f"commit {cx.about['commit']}, packed {cx.about['packed']}",
        "devices": output(smi),
        "Python": f"{platform.python_version()}, {sys.executable}",
        "torch": version,
        "libraries": f"{len(libraries)} folders, the first {libraries[0]}" if libraries else "those of the system",
        "system": f"{platform.platform()}, {os.cpu_count()} processors, {' '.join(platform.libc_ver())}",
        "free disk": f"{shutil.disk_usage(cx.work).free >> 30} GiB in {cx.work}",
    }
    cx.records.add(machine=machine)
    cx.records.add(machine={"binary": cx.compiler.call("--version").strip()})
    fits = version.split("+")[0] == context.TORCH_VERSION
    if not cx.dry:
        cx.records.condition(f"torch is {context.TORCH_VERSION}", fits, version)


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "none"
    except FileNotFoundError:
        return "none"


def doctor(cx: Context) -> None:
    """Records the findings of `doctor`."""
    report = cx.compiler.call_json("doctor")
    for finding in report["findings"]:
        cx.records.add(finding=finding)
    cx.records.condition("the binary has the runtime", report["runtime"])
    if not cx.dry:
        nccl = [finding for finding in report["findings"] if finding["name"] == "nccl"]
        found = nccl[0]["found"] if nccl else "no such finding"
        cx.records.condition("NCCL sums over one rank", bool(nccl) and nccl[0]["state"] == "good", found)


def fixture(cx: Context) -> None:
    """Runs one small graph in the first environment that works, which all later steps take."""
    folder = context.torch_folder()
    ways: list[dict[str, str]] = [
        {},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
        {"LD_PRELOAD": str(folder / "lib" / "libtorch_cuda.so") if folder else ""},
    ]
    failures: list[str] = []
    for way in ways[:1] if cx.dry else ways:
        os.environ.update(way)
        try:
            cx.run("fixture gpt2, forward", cx.fixture("gpt2"), cx.feed("gpt2"))
        except Refused as refused:
            failures.append(f"{way}: {refused}")
            for name in way:
                del os.environ[name]
            continue
        (cx.work / context.ENVIRONMENT).write_text(json.dumps(way))
        cx.records.condition("runs in the environment as it is", not way, "; ".join(failures))
        return
    raise Refused("; ".join(failures))


def weights(cx: Context) -> None:
    """Makes the weights of the measured models beside copies of their graphs."""
    shutil.copytree(cx.root / "models", cx.work / "models", dirs_exist_ok=True)
    for name, model in cx.about["models"].items():
        written = models.fill(cx.work / "models" / name, model["dims"], model["classes"])
        cx.records.add(weights=name, bytes=written)


def pytorch(cx: Context) -> None:
    """Records what PyTorch sees. Its files are in the system's cache afterwards, for the steps that measure it."""
    if lacking := context.lacks_peers():
        raise Skipped(lacking)
    begun = time.monotonic()
    import torch

    from tools.lib import models as modules

    version = f"{torch.__version__}, CUDA {torch.version.cuda}, {len(modules.MODELS)} models"
    cx.records.add(machine={"PyTorch": f"{version}, loaded in {time.monotonic() - begun:.1f} s"})
    ones = torch.ones(64, 64, device=cx.device)
    total = float((ones @ ones).sum())
    cx.records.condition("PyTorch computes on the device", total == 64.0**3, total)


def verify(cx: Context) -> None:
    """Compares planned with unplanned steps."""
    for name, policy, attention in VERIFIED:
        planned = cx.train(name, policy, "--policy", policy)
        words = ["--device", cx.device, "--attention", attention]
        try:
            report = cx.compiler.call_json("verify", cx.fixture(name), planned, *cx.feed(name), *words)
            equal, found = report["equal"], f"{len(report['outputs'])} tensors"
        except Refused as refused:
            equal, found = False, str(refused)
        cx.records.condition(f"{name}, {policy}, attention {attention}: planned = unplanned bit for bit", equal, found)


def repeat(cx: Context) -> None:
    """Runs steps twice, and on the CPU."""
    cases: list[tuple[str, str, tuple[str, ...]]] = [
        ("gpt2", "full", ()),
        ("llama32", "selective", ()),
        ("llama32", "none, sequence in chunks", ("--tile-sequence", "4", "--drop-output", "logits")),
        ("llama32_bf16", "full", ()),
        ("llama32_bf16", "none, loss in chunks", ("--tile-loss", "4", "--drop-output", "logits")),
    ]
    for name, what, options in cases:
        case, policy = f"{name}, {what}", what.split(",")[0]
        stem = case.replace(", ", ".").replace(" ", "-")
        graph = cx.train(name, stem, "--policy", policy, *options)
        # numpy has no bfloat16.
        suffix = "safetensors" if name.endswith("bf16") else "npz"
        files = [cx.folder / f"{stem}.{run}.{suffix}" for run in ("first", "second", "cpu")]
        for file, label in zip(files, (case, f"{case}, again")):
            cx.run(label, graph, cx.feed(name), "--outputs", file)
        cx.same(f"{case}: a second run gives the same bits", *files[:2])
        if suffix == "npz":
            cx.compiler.call("run", graph, *cx.feed(name), "--outputs", files[2])
            on_device, on_cpu = read_tensors(files[0]), read_tensors(files[2])
            gradients = {n: t for n, t in on_cpu.items() if n.endswith(".grad")}
            worst = tolerance.compare(on_device, on_cpu, tolerance.largest(gradients))
            cx.records.condition(f"{case}: agrees with the CPU", worst.agrees, worst)


TRAININGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("gpt2", "gradients", ()),
    ("llama32", "adamw", ("--optimizer", "adamw", "--fuse-optimizer")),
    ("gpt2", "sgd", ("--optimizer", "sgd:momentum=0.9,weight_decay=0.1", "--fuse-optimizer")),
    ("llama32_bf16", "gradients", ()),
    ("llama32", "adamw apart", ("--optimizer", "adamw")),
    ("llama32", "offload", ("--offload", "block-inputs")),
)
RANDOM = """graph @g imported (%x: bf16[60, 1000], %rng_seed: i64[]) -> (%y, %u) {
  init %ratio : f32[] = 0.1
  init %one : i64[] = 1
  init %two : i64[] = 2
  init %dims : i64[2] = [30, 70]
  %d = Dropout %x, %ratio, %rng_seed, %one
  %y = Dropout %d, %ratio, %rng_seed, %two
  %u = SeededUniform %dims, %rng_seed, %two
}
"""
"""Draws that a replay makes by keys in the device's memory."""


def cuda_graphs(cx: Context) -> None:
    """Compares steps replayed as CUDA graphs with steps that run node by node."""
    random = cx.folder / "random.ckir"
    random.write_text(RANDOM)
    seeded: list[str | Path] = ["--seed", "1"]
    graphs = [
        (f"{name}, {what}", cx.train(name, what.replace(" ", "-"), "--policy", "full", *options), cx.feed(name))
        for name, what, options in TRAININGS
    ]
    for case, graph, feed in [("random numbers", random, seeded), *graphs]:
        files = []
        for switch in ("off", "on"):
            file = graph.with_suffix(f".{switch}.safetensors")
            files.append(file)
            words = ("--outputs", file, "--steps", STEPS, "--cuda-graphs", switch)
            report = cx.run(f"{case}, CUDA graphs {switch}", graph, feed, *words)
        cx.replayed(case, report)
        cx.same(f"{case}: {STEPS} replayed steps give the bits of steps node by node", *files)


CHAIN = """graph @g imported (%x: {0}[40, 300], %y: {0}[40, 300], %b: {0}[300], %dy: {0}[40, 300]) -> (%d, %e, %r) {{
  %s = Add %x, %b
  %p = Mul %s, %y
  %r = Relu %p
  %q = Sub %r, %x
  %d = Div %q, %y
  %e = ReluGrad %r, %dy
}}
"""
"""Ops that round each result once, whatever the kernel."""


def fused_kernels(cx: Context) -> None:
    """Compares generated kernels with PyTorch's, and planned with unplanned steps that both use generated ones."""
    for dtype in ("f32", "bf16"):
        graph = cx.folder / f"chain.{dtype}.ckir"
        graph.write_text(CHAIN.format(dtype))
        files = [cx.folder / f"chain.{dtype}.{switch}.safetensors" for switch in ("off", "on")]
        for file, switch in zip(files, ("off", "on")):
            words = ("--outputs", file, "--fused-kernels", switch)
            cx.run(f"chain {dtype}, fused kernels {switch}", graph, ["--seed", "1"], *words)
        cx.same(f"chain {dtype}: fused kernels give the bits of PyTorch's", *files)
    for name in ("llama32",):
        graph = cx.train(name, "fused", "--policy", "full")
        files = [cx.folder / f"{name}.{run}.npz" for run in ("off", "on", "again")]
        for file, switch in zip(files, ("off", "on", "on")):
            words = ("--outputs", file, "--fused-kernels", switch)
            cx.run(f"{name}, {file.stem}, fused kernels {switch}", graph, cx.feed(name), *words)
        cx.same(f"{name}, fused kernels: a second run gives the same bits", *files[1:])
        # PyTorch's own kernels contract products and sums.
        plain, fused = read_tensors(files[0]), read_tensors(files[1])
        gradients = {n: t for n, t in plain.items() if n.endswith(".grad")}
        worst = tolerance.compare(fused, plain, tolerance.largest(gradients))
        cx.records.condition(f"{name}: fused kernels agree with PyTorch's", worst.agrees, worst)
    for name in ("gpt2", "llama32_bf16"):
        planned = cx.train(name, "fused", "--policy", "full")
        options = ["--device", cx.device, "--fused-kernels", "on"]
        try:
            report = cx.compiler.call_json("verify", cx.fixture(name), planned, *cx.feed(name), *options)
            equal, found = report["equal"], f"{len(report['outputs'])} tensors"
        except Refused as refused:
            equal, found = False, str(refused)
        cx.records.condition(f"{name}, fused kernels: planned = unplanned bit for bit", equal, found)


WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("streams", ()), ("no streams", ("--async-transfers", "off")), ("not locked", ("--pin-memory", "off")),
)  # fmt: skip


def offload(cx: Context) -> None:
    """Compares steps that offload, in every way, with a step that does not."""
    name = "llama32"
    expected = cx.folder / "expected.npz"
    cx.run(
        f"{name}, nothing offloaded", cx.train(name, "none", "--policy", "none"), cx.feed(name), "--outputs", expected
    )
    for what in ("cpu", "disk", "block-inputs"):
        graph = cx.train(name, what, "--policy", "none", "--offload", what)
        for way, options in WAYS:
            case, file = f"{name}, offload {what}, {way}", cx.folder / "found.npz"
            words = ("--outputs", file, "--steps", STEPS, "--offload-dir", cx.folder, *options)
            report = cx.run(case, graph, cx.feed(name), *words)
            cx.same(f"{case}: step {STEPS} has the bits of a step without", file, expected)
            moved, predicted = report["outside_peak_bytes"], report["predicted_outside_bytes"]
            found = f"{moved} bytes, {predicted} predicted"
            cx.records.condition(f"{case}: offloads no more than predicted", 0 < moved <= predicted, found)


HEADS = {
    "flash": ((64, 64, 1), (64, 64, 4), (128, 128, 1), (40, 40, 1)),
    "efficient": ((192, 128, 1), (64, 32, 1), (320, 320, 1)),
}
"""Kernels, and the sizes that use them: of a key, of a value, and query heads of one key head."""


def attention_graph(dtype: str, sizes: tuple[tuple[int, int, int], ...], length: int) -> str:
    """Returns a graph of attentions and their gradients, with a causal mask and without."""
    inputs, nodes, outputs = [], [], []
    for at, (causal, (size, value_size, groups)) in enumerate(itertools.product((0, 1), sizes)):
        of = f"{dtype}[2, 8, {length}, {{}}]".format
        keys = f"{dtype}[2, {8 // groups}, {length}, {{}}]".format
        inputs += [
            f"%dy{at}: {of(value_size)}",
            f"%q{at}: {of(size)}",
            f"%k{at}: {keys(size)}",
            f"%v{at}: {keys(value_size)}",
        ]
        outputs += [f"%y{at}", f"%dq{at}", f"%dk{at}", f"%dv{at}"]
        operands, given = f"%q{at}, %k{at}, %v{at}", f"causal={causal}, scale=0.125"
        nodes += [f"  %y{at} = Attention {operands} {{{given}}}"]
        nodes += [f"  %dq{at}, %dk{at}, %dv{at} = AttentionGrad %dy{at}, {operands} {{{given}, wants=[0, 1, 2]}}"]
    return f"graph @g imported ({', '.join(inputs)}) -> ({', '.join(outputs)}) {{\n" + "\n".join([*nodes, "}", ""])


def attention(cx: Context) -> None:
    """Runs attention by PyTorch's fused kernels; the runtime itself compares them with tiles before it uses them."""
    for dtype in ("bf16", "f16"):
        for kernel, sizes in HEADS.items():
            case = f"attention {dtype}, {kernel}"
            graph = cx.folder / f"{dtype}.{kernel}.ckir"
            graph.write_text(attention_graph(dtype, sizes, 30 if cx.dry else 300))
            files = [cx.folder / f"{dtype}.{kernel}.{run}.safetensors" for run in (1, 2)]
            for file, label in zip(files, (case, f"{case}, again")):
                report = cx.run(label, graph, ["--seed", "1"], "--outputs", file)
            wanted = {"flash": 0, "efficient": 0, "tiles": 0} | {"tiles" if cx.dry else kernel: 4 * len(sizes)}
            cx.records.condition(f"{case}: runs by that kernel", report["attention"] == wanted, report["attention"])
            cx.records.condition(f"{case}: no warnings", not report["warnings"], "; ".join(report["warnings"]))
            cx.same(f"{case}: a second run gives the same bits", *files)


ROWS, INNER, COLUMNS = 5, 600, 3


def products(cx: Context) -> None:
    """Adds products of 16-bit whole numbers whose sums are exact in float32 only."""
    for dtype in ("bf16", "f16"):
        for a, b, flips in (
            ((ROWS, INNER), (INNER, COLUMNS), ""),
            ((INNER, ROWS), (COLUMNS, INNER), " {transA=1, transB=1}"),
        ):
            case = f"product {dtype}{', both transposed' if flips else ''}"
            graph, file = cx.folder / "product.ckir", cx.folder / "product.npz"
            graph.write_text(
                "graph @g imported () -> (%t) {\n"
                f"  init %s : f32[{ROWS}, {COLUMNS}] = splat 3\n"
                f"  init %a : {dtype}{list(a)} = splat 7\n  init %b : {dtype}{list(b)} = splat 1\n"
                f"  %t = AddProduct %s, %a, %b{flips}\n}}\n"
            )
            cx.run(case, graph, [], "--outputs", file)
            found, wanted = read_tensors(file)["t"], 3 + 7 * INNER
            cx.records.condition(
                f"{case}: sums are exact", (found == wanted).all(), f"{found.max()}, expected {wanted}"
            )


RANKS = ((1, "none"), (2, "none"), (2, "params"))
"""Numbers of ranks, and what each keeps a slice of. Two need two devices."""
LOSS_TOLERANCE = 1e-4
"""NCCL adds up gradients in an order of its own."""


def ranks(cx: Context) -> None:
    """Trains a fixture on one rank and, where there are two devices, on two, which exchange by NCCL."""
    tokens = cx.folder / "tokens.bin"
    tokens.write_bytes(b"".join(((7 * i * i + i) % 50).to_bytes(2, "little") for i in range(768)))
    devices = len(RANKS) if cx.dry else len(output(["nvidia-smi", "--list-gpus"]).splitlines())
    expected = None
    for count, shard in RANKS:
        case = f"gpt2, {count} ranks, --shard {shard}"
        if count > devices:
            cx.records.add(machine={case: f"left out: {devices} device"})
            continue
        options = ["--loss", "causal-lm", "--policy", "full", "--lr", "1e-2", "--steps", "6", "--shard", shard]
        options += ["--device", cx.device, "--ranks", str(count), *dim_options({"batch": 4 // count, "seq": 16})]
        files = ("--data", tokens, "--out", cx.folder / f"{count}-{shard}")
        report = cx.compiler.call_json("train", cx.fixture("gpt2"), *options, *files)
        loss, peaks = report["last_loss"], [rank["peak_bytes"] for rank in report["ranks"]]
        expected = expected or loss
        near = abs(loss - expected) <= LOSS_TOLERANCE * expected
        found = f"{loss}, {expected} on one rank; peaks of {peaks or [report['peak_bytes']]} bytes"
        cx.records.condition(f"{case}: the last loss is that of one rank", near, found)
