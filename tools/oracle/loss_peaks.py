"""Trains models of five architectures with losses in chunks, and compares peaks, losses and gradients.

    python tools loss_peaks --ckpt-opt BINARY [--only NAME,…] [--bodies decoder,…] [--exporters dynamo,file] [--keep FOLDER]
        [--results FILE.jsonl] [--page FILE.md]

A small decoder, encoder, encoder-decoder, mixture of experts and vision transformer of transformers, each with a head of many
classes and a loss of `loss_forms`, is exported as ONNX and as a torch.export file (`.pt2`), and compiled with head and loss in
16 chunks and nothing else recomputed. A row fails if

- the step peaks above a quarter of one tensor of scores, parameters and inputs aside, or not where it was predicted to;
- loss or gradients are not PyTorch's (tolerance.py), or not those of the same file in ONNX Runtime.

Needs tools/requirements-torch.txt. Exit code 1 if a row fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tools.lib import options, page, results, tolerance
from tools.lib.compiler import Compiler, Refused, write_tensors
from tools.lib.results import Row
from tools.oracle.loss_forms import FORMS, Case, Form, Model, reference

LOSSES = (
    "mean,softcap,smoothing-by-hand,z-loss,class-weights,focal,distillation,dpo,orpo,kto,grpo,contrastive,pixels,ctc"
)
EXPORTERS = ("dynamo", "file")
VOCAB, WIDTH, BATCH, SEQ = 16384, 16, 16, 64
"""Losses of whole answers subtract sums over SEQ tokens: the more there are, the more of the difference is rounding."""
UNEXPORTED = [("moe", "dynamo")]
"""What PyTorch cannot export."""
CHUNKS = 16
TOKENS, PADDING = 62, 2
"""PyTorch computes no gradient for an embedding's padding, the first tokens here; ONNX files do not say which these are."""
SIDE = 8
"""Of a picture, in patches of one pixel: as many as a sequence has tokens."""
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": TOKENS + PADDING}
LLAMA = SMALL | {"intermediate_size": 2 * WIDTH, "num_key_value_heads": 1, "tie_word_embeddings": False}


def decoder() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**LLAMA))


def encoder() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = SMALL | {"intermediate_size": 2 * WIDTH, "max_position_embeddings": SEQ}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**sizes, **dropout), add_pooling_layer=False)


def seq2seq() -> nn.Module:
    from transformers import BartConfig, BartModel

    layers = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))
    }
    ffn = {"encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "max_position_embeddings": SEQ}
    return BartModel(BartConfig(d_model=WIDTH, vocab_size=TOKENS + PADDING, dropout=0.0, **layers, **ffn))


def moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralModel

    return MixtralModel(MixtralConfig(**LLAMA, num_local_experts=2, num_experts_per_tok=1))


def vision() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"intermediate_size": 2 * WIDTH}
    picture = {"image_size": SIDE, "patch_size": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTModel(ViTConfig(**sizes, **picture), add_pooling_layer=False)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder, "encoder": encoder, "seq2seq": seq2seq, "moe": moe, "vision": vision,
}  # fmt: skip


class OnBody(Model):
    """A body of transformers with the head and the loss of a form."""

    def __init__(self, form: Form, name: str) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(5)
        self.name = name
        self.body = BODIES[name]()
        # A contrastive loss compares rows with rows. Its projection is no head, and stays small.
        self.add_head(form, 4 * WIDTH if form is FORMS["contrastive"] else VOCAB, WIDTH)
        # ONNX Runtime's Sigmoid ends at -18, which log-probabilities of whole sequences would pass.
        self.reference_head.mul_(0.1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if self.name == "vision":
            h = self.body(pixel_values=input_ids).last_hidden_state[:, 1:]
        elif self.name == "seq2seq":
            h = self.body(input_ids=input_ids, decoder_input_ids=labels % TOKENS + PADDING).last_hidden_state
        else:
            h = self.body(input_ids=input_ids).last_hidden_state
        return self.form.loss(self, h, labels)


def example(name: str, batch: int) -> dict[str, np.ndarray]:
    """Returns inputs for a body: a batch of tokens or pictures, and labels."""
    n = np.random.default_rng(7)
    if name == "vision":
        pixels = n.standard_normal((batch, 3, SIDE, SIDE)).astype(np.float32)
        return {"input_ids": pixels, "labels": n.integers(0, VOCAB, (batch, SIDE * SIDE))}
    ids, labels = n.integers(PADDING, TOKENS, (batch, SEQ)), n.integers(0, VOCAB, (batch, SEQ))
    return {"input_ids": ids, "labels": labels}


def export(model: OnBody, feed: dict[str, np.ndarray], folder: Path, exporter: str) -> Path:
    """Writes the model with the sizes of its inputs."""
    inputs = tuple(torch.from_numpy(tensor) for tensor in feed.values())
    program = torch.export.export(model, inputs, strict=False)
    if exporter == "file":
        torch.export.save(program, folder / "model.pt2")
        return folder / "model.pt2"
    written = torch.onnx.export(program, dynamo=True, opset_version=18, output_names=["loss"], verbose=False)
    written.save(str(folder / "model.onnx"))
    return folder / "model.onnx"


class Trained(Case):
    """A loss on a body, by an exporter."""

    def __init__(self, compiler: Compiler, loss: str, body: str, exporter: str, folder: Path) -> None:
        super().__init__(compiler, loss, exporter, folder, 1)
        self.model = OnBody(self.form, body).eval()
        # The scores compare each row with all rows, so they are large only if there are many rows.
        self.feed = example(body, 8 * BATCH if loss == "contrastive" else BATCH)
        self.folded: list[str] = []
        self.row: Row = {"loss": loss, "body": body, "exporter": exporter}

    def check(self) -> list[str]:
        source = export(self.model, self.feed, self.folder, self.exporter)
        loss = self.look(source)
        graph, inputs = self.folder / "cut.onnx", self.folder / "inputs.safetensors"
        options = ("--loss", loss, "--policy", "none", "--tile-loss", str(CHUNKS))
        report = self.compiler.call_json(source, "-o", graph, *options)
        write_tensors(inputs, self.named(self.feed))
        ran = self.compiler.run(graph, inputs, self.folder / "outputs.safetensors")
        static, predicted, measured = (ran[f"{k}_bytes"] for k in ("static", "predicted_peak", "measured_peak"))
        rows = self.feed["labels"].size
        wide = rows if self.row["loss"] == "contrastive" else VOCAB
        self.row |= {"peak": measured - static, "scores": 4 * rows * wide, "chunks": sorted(report["tiled"].values())}
        if measured != predicted:
            self.wrong.append(f"{predicted} bytes predicted, {measured} measured")
        if self.row["peak"] * 4 >= self.row["scores"]:
            self.wrong.append(f"the peak is {self.row['peak']} bytes: {' '.join(report['warnings'])}")
        self.agree(self.ours(graph, self.feed), graph)
        return self.wrong

    def agree(self, got: dict[str, np.ndarray], graph: Path) -> None:
        want = reference(self.model, self.feed)
        told = {told for told, _ in self.names.values()}
        self.folded = sorted(self.trained - told)
        want = {name: tensor for name, tensor in want.items() if name.removesuffix(".grad") not in self.folded}
        top = tolerance.largest({n: w for n, w in want.items() if n != "loss"})
        elsewhere = self.elsewhere(graph, self.feed)
        for other, place in ((want, "PyTorch"), ({n: elsewhere[n] for n in want}, "ONNX Runtime")):
            worst = tolerance.compare(got, other, top)
            if not worst.agrees:
                self.wrong.append(f"against {place} {worst}")


def line(row: Row) -> str:
    share = f"{100 * row['peak'] / row['scores']:.0f} %" if "peak" in row else ""
    return f"| {row['loss']} | {row['body']} | {row['exporter']} | {share} | {row['held']} |"


def main() -> int:
    parser = options.with_binary(__doc__)
    parser.add_argument("--only", type=options.words_of(FORMS), default=options.words(LOSSES), help="losses")
    parser.add_argument("--bodies", type=options.words_of(BODIES), default=list(BODIES), help="comma-separated names")
    parser.add_argument("--exporters", type=options.words_of(EXPORTERS), default=list(EXPORTERS))
    parser.add_argument("--keep", type=Path, help="keep the files in this folder")
    results.add_option(parser)
    options.add_page(parser)
    given = parser.parse_args()
    compiler = Compiler(given.ckpt_opt)
    rows = results.read(given.results)
    done = [(row["loss"], row["body"], row["exporter"]) for row in rows]
    cases = [(loss, body, way) for loss in given.only for body in given.bodies for way in given.exporters]
    cases = [case for case in cases if case[2] in FORMS[case[0]].exporters]
    with options.folder_or_scratch(given.keep) as kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            if case in done:
                continue
            rows.append(row_of(compiler, *case, kept / "-".join(case)))
            print(line(rows[-1]), *rows[-1]["wrong"], sep="\n", flush=True)
            results.append(given.results, rows[-1:])
    rows = sorted((row for row in rows if place(row) in cases), key=lambda row: cases.index(place(row)))
    lines = [
        page.head(f"PyTorch {torch.__version__}, {VOCAB} classes, {CHUNKS} chunks, {BATCH} x {SEQ} tokens", 1),
        "",
        "| loss | body | exporter | peak, % of a tensor of scores | loss and gradients |",
        "|---|---|---|--:|---|",
        *(line(row) for row in rows if "peak" in row),
    ]
    notes = dict.fromkeys(row["note"] for row in rows if row["note"])
    failures = [f"{' on '.join(place(row)[:2])} by {row['exporter']}: {text}" for row in rows for text in row["wrong"]]
    return page.finish("Losses in chunks", lines, list(notes), failures, given.page)


def place(row: Row) -> tuple[str, str, str]:
    return row["loss"], row["body"], row["exporter"]


def row_of(compiler: Compiler, loss: str, body: str, exporter: str, folder: Path) -> Row:
    """Returns what a case took, what is wrong with it, and a note."""
    folder.mkdir(exist_ok=True)
    case = Trained(compiler, loss, body, exporter, folder)
    note = ""
    try:
        wrong = case.check()
    except Refused as refused:
        wrong = [str(refused)]
    except (torch.onnx.errors.OnnxExporterError, torch._dynamo.exc.UserError) as error:
        note = f"{body} by {exporter}: PyTorch does not export it: {type(error).__name__}"
        wrong = [] if (body, exporter) in UNEXPORTED else [note]
    if case.folded:
        note = f"{body} by {exporter}: the exporter made {', '.join(case.folded)} a constant"
    held = "no" if wrong else "as PyTorch's and ONNX Runtime's"
    return case.row | {"held": held, "wrong": wrong, "note": note}
