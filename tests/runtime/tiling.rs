//! A head and loss computed part by part gives the loss and the gradients of the whole, in every form of loss.
use crate::support::torch;

use ckpt_opt::runtime::executor::Program;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph};
use ckpt_passes::plan::Policy;
use ckpt_passes::text;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::tile::{Tile, Tiles};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};
use torch::tensor;

const CLASSES: i64 = 11;

/// Heads and losses; `%h` are activations of `batch` × `seq` tokens, `%labels` their classes.
const FORMS: &[(&str, &str)] = &[
    (
        "mean with class weights and ignored labels",
        "%z = MatMul %h, %w
  %s = Reshape %z, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "sum over rows with a bias, in one op",
        "%flat = Reshape %h, %narrow
  %s = Gemm %flat, %w, %bias
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"sum\", ignore_index=-100}",
    ),
    (
        "a soft cap, log-probabilities, then their mean",
        "%z = MatMul %h, %w
  %b = Add %z, %bias
  %d = Div %b, %cap
  %t = Tanh %d
  %c = Mul %t, %cap
  %s = Reshape %c, %matrix
  %p = LogSoftmax %s
  %l = Reshape %labels, %vector
  %total = NegativeLogLikelihoodLoss %p, %l, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "label smoothing by hand",
        "%z = MatMul %h, %w
  %p = LogSoftmax %z
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %p, %at {axis=-1}
  %all = ReduceMean %p, %last
  %few = Mul %all, %small
  %both = Add %hit, %few
  %mean = ReduceMean %both {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "one loss a token and a penalty on the normaliser",
        "%z = MatMul %h, %w
  %s = Reshape %z, %matrix
  %l = Reshape %labels, %vector
  %each = SoftmaxCrossEntropyLoss %s, %l {reduction=\"none\", ignore_index=-100}
  %n = ReduceLogSumExp %s, %last {keepdims=0}
  %square = Mul %n, %n
  %penalty = Mul %square, %small
  %both = Add %each, %penalty
  %total = ReduceMean %both {keepdims=0}",
    ),
    (
        "scores of all tokens but the last",
        "%z = MatMul %h, %w
  %b = Add %z, %bias
  %some = Slice %b, %start, %stop, %second
  %s = Reshape %some, %matrix
  %rest = Slice %labels, %one, %end, %second
  %l = Reshape %rest, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "classes behind the batch",
        "%z = MatMul %h, %w
  %s = Transpose %z {perm=[0, 2, 1]}
  %total = SoftmaxCrossEntropyLoss %s, %labels, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "classes behind the batch, one loss a token",
        "%z = MatMul %h, %w
  %s = Transpose %z {perm=[0, 2, 1]}
  %each = SoftmaxCrossEntropyLoss %s, %labels {reduction=\"none\", ignore_index=-100}
  %total = ReduceMean %each {keepdims=0}",
    ),
    (
        "no op that compares classes",
        "%z = MatMul %h, %w
  %n = ReduceLogSumExp %z, %last {keepdims=0}
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %z, %at {axis=-1}
  %own = Squeeze %hit, %last
  %d = Sub %n, %own
  %total = ReduceMean %d {keepdims=0}",
    ),
    (
        "probabilities",
        "%z = MatMul %h, %w
  %p = Softmax %z {axis=-1}
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %p, %at {axis=-1}
  %log = Log %hit
  %mean = ReduceMean %log {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "a transposed weight",
        "%wt = Transpose %tied {perm=[1, 0]}
  %z = MatMul %h, %wt
  %s = Reshape %z, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "log-probabilities of whole sequences, compared with those of a frozen head",
        "%z = MatMul %h, %w
  %p = LogSoftmax %z
  %q = MatMul %x, %frozen
  %r = LogSoftmax %q
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %own = GatherElements %p, %at {axis=-1}
  %theirs = GatherElements %r, %at {axis=-1}
  %d = Sub %own, %theirs
  %each = ReduceSum %d, %axes {keepdims=0}
  %s = Sigmoid %each
  %log = Log %s
  %mean = ReduceMean %log {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "a ratio of probabilities that is clipped, and an entropy, each normalised by sequence",
        "%z = MatMul %h, %w
  %b = Add %z, %bias
  %p = LogSoftmax %b
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %p, %at {axis=-1}
  %own = Squeeze %hit, %last
  %stopped = StopGradient %own
  %d = Sub %own, %stopped
  %ratio = Exp %d
  %capped = Min %ratio, %cap
  %mean = ReduceMean %own, %second
  %centred = Sub %own, %mean
  %gain = Mul %capped, %centred
  %e = Exp %p
  %pe = Mul %e, %p
  %entropy = ReduceSum %pe, %last {keepdims=0}
  %both = Add %gain, %entropy
  %each = ReduceMean %both, %second {keepdims=0}
  %square = Mul %each, %each
  %total = ReduceMean %square {keepdims=0}",
    ),
];

fn model(form: &str, sizes: &str) -> Graph {
    let list = |n: usize, f: &dyn Fn(usize) -> f64| {
        let all: Vec<String> = (0..n).map(|i| format!("{:.3}", f(i))).collect();
        all.join(", ")
    };
    let weights = list(44, &|i| ((i * 37 % 23) as f64 - 11.0) / 7.0);
    let bias = list(11, &|i| (i as f64 - 5.0) / 9.0);
    let class = list(11, &|i| 0.5 + (i % 4) as f64);
    text::parse(&format!(
        "graph @g imported (%x: f64[{sizes}, 4], %labels: i64[{sizes}]) -> (%total) {{
  init %scale : f64[4] = [1.5, -0.5, 0.75, 2]
  init %w : f64[4, 11] = [{weights}]
  init %tied : f64[11, 4] = [{weights}]
  init %frozen : f64[4, 11] = [{weights}]
  init %bias : f64[11] = [{bias}]
  init %weights : f64[11] = [{class}]
  init %cap : f64[] = 3
  init %small : f64[] = 0.125
  init %none : i64[] = 0
  init %matrix : i64[2] = [-1, 11]
  init %narrow : i64[2] = [-1, 4]
  init %vector : i64[1] = [-1]
  init %last : i64[1] = [-1]
  init %start : i64[1] = [0]
  init %stop : i64[1] = [-1]
  init %one : i64[1] = [1]
  init %end : i64[1] = [9223372036854775807]
  init %second : i64[1] = [1]
  init %axes : i64[2] = [1, 2]
  %h = Mul %x, %scale
  {form}
}}
"
    ))
    .unwrap_or_else(|e| panic!("{e}"))
}

fn training(form: &str, sizes: &str, tile: Tile) -> (Graph, Vec<(String, usize)>) {
    let mut graph = model(form, sizes);
    let mut request = Request {
        loss: Loss::Output("total".into()),
        plan: Policy::NONE.into(),
        tile: Tiles {
            loss: tile,
            ..Tiles::default()
        },
        ..Request::default()
    };
    request.selection.trainable = ["w", "tied", "bias", "scale"].map(String::from).to_vec();
    request.selection.trainable.retain(|name| {
        graph
            .find_value(name)
            .is_some_and(|v| !graph.value(v).uses().is_empty())
    });
    let done = compile(&mut graph, &request, &mut Watch::default());
    let done = done.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(done.warnings, Vec::<String>::new());
    (graph, done.tiled)
}

fn run(graph: &Graph, feed: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let program = Program::new(graph).unwrap_or_else(|e| panic!("{e}"));
    let done = program.run(feed).unwrap_or_else(|e| panic!("{e}"));
    done.outputs.into_iter().collect()
}

fn feed(batch: i64, seq: i64, label: impl Fn(usize) -> i64) -> BTreeMap<String, Tensor> {
    let n = (batch * seq) as usize;
    let x: Vec<f64> = (0..4 * n)
        .map(|i| ((i * 29 % 31) as f64 - 15.0) / 13.0)
        .collect();
    let labels: Vec<f64> = (0..n).map(|i| label(i) as f64).collect();
    BTreeMap::from([
        ("x".to_string(), tensor(DType::F64, &[batch, seq, 4], &x)),
        (
            "labels".to_string(),
            tensor(DType::I64, &[batch, seq], &labels),
        ),
    ])
}

fn compare(name: &str, whole: &Graph, parts: &Graph, feed: &BTreeMap<String, Tensor>) {
    let (a, b) = (run(whole, feed), run(parts, feed));
    assert_eq!(
        a.keys().collect::<Vec<_>>(),
        b.keys().collect::<Vec<_>>(),
        "{name}"
    );
    for (output, a) in &a {
        let b = &b[output];
        assert_eq!(
            (a.kind(), a.size()),
            (b.kind(), b.size()),
            "{name}: {output}"
        );
        let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
        assert!(
            a.isnan().equal(&b.isnan()),
            "{name}: {output} has NaN in other places"
        );
        let most = a
            .abs()
            .nan_to_num(0.0, None, None)
            .max()
            .double_value(&[])
            .max(1e-3);
        let gap = (&a - &b)
            .abs()
            .nan_to_num(0.0, None, None)
            .max()
            .double_value(&[]);
        let least = if output == "loss" { 1e-6 } else { 1e-12 };
        assert!(
            gap <= least * most,
            "{name}: {output} is off by {gap}, its largest element is {most}"
        );
    }
}

#[test]
fn parts_make_the_whole() {
    let _turn = torch::alone();
    for (name, form) in FORMS {
        for (sizes, batch, seq) in [("batch, seq", 3, 5), ("3, 5", 3, 5), ("batch, seq", 1, 1)] {
            if seq == 1 && form.contains("Slice") {
                continue; // one token has no next one
            }
            let (whole, none) = training(form, sizes, Tile::Off);
            assert_eq!(none, []);
            for n in [2, 4, 15, 40] {
                let (parts, tiled) = training(form, sizes, Tile::Chunks(n));
                assert_eq!(
                    tiled.len(),
                    form.matches(" = MatMul").count().max(1),
                    "{name}"
                );
                let some = feed(batch, seq, |i| {
                    if i % 5 == 3 {
                        -100
                    } else {
                        (i as i64 * 7) % CLASSES
                    }
                });
                compare(name, &whole, &parts, &some);
                compare(name, &whole, &parts, &feed(batch, seq, |_| -100));
            }
        }
    }
}

#[test]
fn no_part_holds_all_scores() {
    let (_, form) = FORMS[0];
    let (parts, tiled) = training(form, "32, 4", Tile::Chunks(8));
    assert_eq!(tiled[0].1, 8);
    let wide = |v: &ckpt_passes::ir::Value| {
        let n = v.ty.as_ref().and_then(|t| t.elements().as_const());
        n.is_some_and(|n| n >= 128 * CLASSES)
    };
    assert!(
        !parts.values().any(|(_, v)| wide(v)),
        "{}",
        text::print(&parts)
    );
}

#[test]
fn scores_that_are_an_output_stay_whole_and_say_why() {
    let mut graph = model(FORMS[0].1, "batch, seq");
    let scores = graph.find_value("s").unwrap();
    graph.add_output(scores);
    let mut request = Request {
        loss: Loss::Output("total".into()),
        plan: Policy::NONE.into(),
        tile: Tiles {
            loss: Tile::Chunks(4),
            ..Tiles::default()
        },
        ..Request::default()
    };
    request.selection.trainable = vec!["w".into()];
    let done =
        compile(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
    assert!(done.tiled.is_empty());
    assert!(
        done.warnings[0].contains("an output of the model"),
        "{:?}",
        done.warnings
    );
}

#[test]
fn a_sum_of_narrow_terms_has_the_bits_of_a_cast_and_an_add() {
    let _turn = torch::alone();
    let graph = text::parse(
        "graph @g typed (%sum: f32[r, c], %part: bf16[r, c]) -> (%a, %b) {
  %a = Accumulate %sum, %part : f32[r, c]
  %wide = Cast %part {to=f32} : f32[r, c]
  %b = Add %sum, %wide : f32[r, c]
}
",
    )
    .unwrap_or_else(|e| panic!("{e}"));
    for (r, c) in [(2500, 700), (3, 5), (1, 1)] {
        let numbers = |step: i64| -> Vec<f64> {
            let number = |i: i64| ((i * step % 1009) as f64 - 500.0) / 37.0;
            (0..r * c).map(number).collect()
        };
        let feed = BTreeMap::from([
            ("sum".into(), tensor(DType::F32, &[r, c], &numbers(29))),
            ("part".into(), tensor(DType::BF16, &[r, c], &numbers(31))),
        ]);
        let done = run(&graph, &feed);
        assert!(done["a"].equal(&done["b"]), "{r} {c}");
    }
}
