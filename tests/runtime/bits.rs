//! On the fixtures, in float32 and bfloat16: recomputation changes no bit, and what is measured is what was predicted.
use crate::support::torch;

use ckpt_opt::frontend;
use ckpt_opt::runtime::{convert, executor::Program};
use ckpt_passes::analysis::{Binding, MemoryProfile, Sizes};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, ValueId};
use ckpt_passes::plan::{Constraint, Policy};
use ckpt_passes::planning::overrides::{Override, PolicyOverrides, Target};
use ckpt_passes::testing::{Takes, sharing};
use ckpt_passes::transform::loss::Loss;
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

const BATCH: i64 = 2;
const SEQ: i64 = 33;

fn compiled(model: &str, loss: &str, policy: Policy) -> (Graph, Binding) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("fixtures").join(model).join("model.onnx");
    let mut graph = frontend::read(&path).unwrap().graph;
    let request = Request {
        loss: Loss::parse(loss).unwrap(),
        plan: policy.into(),
        dims: vec![("batch".into(), BATCH), ("seq".into(), SEQ)],
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default())
        .unwrap_or_else(|e| panic!("{model}: {e}"));
    (graph, done.planned.unwrap().binding)
}

/// Small whole numbers that differ: token ids, labels and masks of ones alike.
fn input(graph: &Graph, sizes: &Sizes, id: ValueId) -> Tensor {
    let (name, dims) = (&graph.value(id).name, sizes.dims(id));
    let n: i64 = dims.iter().product();
    let token = |i: i64| match name.as_str() {
        name if name.contains("mask") => 1.0,
        name if name.contains("position") => (i % SEQ) as f64,
        name if name.contains("type") => (i % 2) as f64,
        // The first ids are special: a row of zeros for padding has no gradient behind a root.
        "input_ids" => (3 + (i * 7) % 29) as f64,
        _ => ((i * 7 + 3) % 29) as f64,
    };
    let values: Vec<f64> = (0..n).map(token).collect();
    torch::tensor(graph.ty(id).dtype, dims, &values)
}

/// Runs a training graph under every policy: the bits are those of the first, and the peak is the predicted one.
/// Returns the measured peaks.
fn same_under(
    what: &str,
    policies: &[Policy],
    compiled: &dyn Fn(Policy) -> (Graph, Binding),
) -> Vec<u64> {
    let mut expected: Option<BTreeMap<String, Tensor>> = None;
    let mut peaks = Vec::new();
    for policy in policies {
        let (graph, binding) = compiled(*policy);
        let sizes = Sizes::new(&graph, &binding).unwrap();
        let predicted = MemoryProfile::new(&graph, &sizes).unwrap();
        let inputs = graph.inputs().iter().map(|id| {
            let name = graph.value(*id).name.clone();
            (name, input(&graph, &sizes, *id))
        });
        let inputs: BTreeMap<String, Tensor> = inputs.collect();
        let program = Program::new(&graph).unwrap();
        let run = program
            .run(&inputs)
            .unwrap_or_else(|e| panic!("{what} {policy}: {e}"));
        let at = |bytes: u64| bytes - run.static_bytes;
        assert_eq!(
            at(run.peak_bytes),
            predicted.peak_bytes - predicted.static_bytes,
            "{what} {policy}: measured and predicted peak above static; at {:?} and {:?}",
            run.peak_at,
            predicted.at.map(|id| graph.node(id).name.clone())
        );
        peaks.push(run.peak_bytes);
        let found: BTreeMap<String, Tensor> = run.outputs.into_iter().collect();
        let gradients = found.keys().filter(|name| name.ends_with(".grad")).count();
        assert!(gradients > 10, "{what}: {gradients} gradients");
        let Some(expected) = &expected else {
            for (name, x) in &found {
                assert!(convert::dtype(x.kind()).is_some());
                let finite = x.to_kind(tch::Kind::Double).isfinite().all();
                assert!(
                    bool::try_from(finite).unwrap(),
                    "{what}: `{name}` is not finite"
                );
            }
            expected = Some(found);
            continue;
        };
        assert!(expected.keys().eq(found.keys()));
        for (name, x) in &found {
            assert!(
                torch::same_bits(x, &expected[name]),
                "{what} {policy}: `{name}`"
            );
        }
    }
    peaks
}

#[test]
fn planned_equals_unplanned_on_the_fixtures() {
    torch::alone();
    let policies = [
        Policy::NONE,
        Policy::FULL,
        Policy::SELECTIVE,
        Policy::every(2),
    ];
    for (model, loss) in [
        ("llama32_bf16", "causal-lm"),
        ("llama32", "causal-lm"),
        ("gpt2", "causal-lm"),
        ("bert", "cross-entropy"),
    ] {
        same_under(model, &policies, &|policy| compiled(model, loss, policy));
    }
}

/// A real export whose layers 2 and 3 attend to the keys and values of layers 0 and 1: recomputing attention there, too,
/// takes less memory than leaving it alone.
#[test]
fn planned_equals_unplanned_on_an_export_that_shares_keys() {
    torch::alone();
    let without_attention = Policy::parse("parts:mlp,norm").unwrap();
    let policies = [
        Policy::NONE,
        Policy::FULL,
        without_attention,
        Policy::SELECTIVE,
        Policy::every(2),
    ];
    let peaks = same_under("gemma3n", &policies, &|policy| {
        compiled("gemma3n", "vjp", policy)
    });
    assert!(peaks[1] < peaks[2] && peaks[2] < peaks[0], "{peaks:?}");
    assert!(peaks[3] < peaks[0], "{peaks:?}");
}

/// Keys and values read by several layers, and weights: attention is recomputed inside the layers that share, which
/// takes less memory than leaving it alone.
#[test]
fn planned_equals_unplanned_where_layers_share() {
    torch::alone();
    let takes = |keys_values, weights| Takes {
        keys_values,
        weights,
    };
    let own = takes(None, None);
    let stacks: [(&str, Vec<Takes>); 3] = [
        (
            "two types in turn",
            vec![own, own, takes(Some(0), None), takes(Some(1), None)],
        ),
        (
            "one layer for all later ones",
            vec![own, own, takes(Some(1), None), takes(Some(1), None)],
        ),
        (
            "weights applied again",
            vec![own, own, takes(None, Some(0)), own],
        ),
    ];
    let parts = |text: &str| Policy::parse(&format!("parts:{text}")).unwrap();
    let policies = [
        Policy::NONE,
        Policy::FULL,
        parts("mlp,norm"),
        parts("core-attn"),
        Policy::SELECTIVE,
    ];
    for (what, layers) in stacks {
        for per_reader in [false, true] {
            let peaks = same_under(what, &policies, &|policy| {
                let mut graph = sharing(&layers, per_reader);
                let request = Request {
                    loss: Loss::Vjp,
                    plan: policy.into(),
                    dims: vec![("b".into(), BATCH), ("s".into(), SEQ)],
                    ..Request::default()
                };
                let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
                (graph, done.planned.unwrap().binding)
            });
            assert!(
                peaks[1] < peaks[2] && peaks[2] < peaks[0] && peaks[3] < peaks[0],
                "{what}: {peaks:?}"
            );
        }
    }
}

/// Two experts of six for each token, and each two experts score alike: which of them is picked must not change.
fn experts() -> Graph {
    let numbers = |n: i64, of: &dyn Fn(i64) -> i64| -> String {
        let all: Vec<String> = (0..n).map(|i| format!("{}", of(i))).collect();
        all.join(", ")
    };
    let router = numbers(24, &|i| (i % 6 / 2 + i / 6) % 3);
    let experts = numbers(96, &|i| (i * 5 + i / 7) % 4 - 1);
    let source = format!(
        "graph @g typed (%x: f32[s, 4]) -> (%y) {{
  init %router : f32[4, 6] = [{router}]
  init %experts : f32[6, 4, 4] = [{experts}]
  init %two : i64[1] = [2]
  init %one : i64[1] = [1]
  init %both : i64[2] = [1, 2]
  %scores = MatMul %x, %router : f32[s, 6]
  %best, %which = TopK %scores, %two {{axis=-1}} : f32[s, 2], i64[s, 2]
  %chosen = Gather %experts, %which {{axis=0}} : f32[s, 2, 4, 4]
  %row = Unsqueeze %x, %both : f32[s, 1, 1, 4]
  %h = MatMul %row, %chosen : f32[s, 2, 1, 4]
  %act = Tanh %h : f32[s, 2, 1, 4]
  %flat = Squeeze %act, %two : f32[s, 2, 4]
  %weight = Unsqueeze %best, %two : f32[s, 2, 1]
  %part = Mul %flat, %weight : f32[s, 2, 4]
  %y = ReduceSum %part, %one {{keepdims=0}} : f32[s, 4]
}}
"
    );
    ckpt_passes::text::parse(&source).unwrap()
}

/// A copy of the choice of experts chooses the same: gradients are those of the graph that chose once.
#[test]
fn a_repeated_choice_of_experts_is_the_same() {
    torch::alone();
    let mut expected: Option<Vec<(String, Tensor)>> = None;
    for (ops, copies) in [
        (&[][..], 0),
        (&["MatMul", "Gather", "Tanh"][..], 0),
        (&["MatMul", "TopK", "Gather", "Tanh"], 1),
    ] {
        let again = |op: &&str| Override {
            constraint: Constraint::Recompute,
            target: Target::op(op).unwrap(),
        };
        let mut graph = experts();
        let request = Request {
            loss: Loss::Vjp,
            plan: Policy::NONE.into(),
            overrides: PolicyOverrides {
                overrides: ops.iter().map(again).collect(),
                ..PolicyOverrides::default()
            },
            dims: vec![("s".into(), SEQ)],
            ..Request::default()
        };
        let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
        let twice = graph.nodes().filter(|(_, n)| n.recompute_of.is_some());
        let names: Vec<&str> = twice.map(|(_, n)| n.op.name).collect();
        let choices = names.iter().filter(|op| **op == "TopK").count();
        assert_eq!(choices, copies, "{names:?}");
        assert_eq!(names.is_empty(), ops.is_empty());
        let sizes = Sizes::new(&graph, &done.planned.unwrap().binding).unwrap();
        let inputs = graph.inputs().iter().map(|id| {
            let name = graph.value(*id).name.clone();
            (name, input(&graph, &sizes, *id))
        });
        let inputs: BTreeMap<String, Tensor> = inputs.collect();
        let run = Program::new(&graph).unwrap().run(&inputs).unwrap();
        let found: Vec<(String, Tensor)> = run.outputs.into_iter().collect();
        assert_eq!(
            found.iter().filter(|(n, _)| n.ends_with(".grad")).count(),
            2
        );
        let expected = expected
            .get_or_insert_with(|| found.iter().map(|(n, x)| (n.clone(), x.copy())).collect());
        for ((name, x), (other, y)) in found.iter().zip(expected.iter()) {
            assert!(name == other && torch::same_bits(x, y), "{ops:?}: `{name}`");
        }
    }
}

/// PyTorch leaves open which of equal elements `topk` takes, so a run names the nodes that had to choose.
#[test]
fn a_choice_among_equal_elements_is_reported() {
    torch::alone();
    let source = "graph @g typed (%x: f32[2, 5]) -> (%best, %which) {
  init %two : i64[1] = [2]
  %best, %which = TopK %x, %two {axis=-1} : f32[2, 2], i64[2, 2]
}
";
    let graph = ckpt_passes::text::parse(source).unwrap();
    for (row, tied) in [
        ([5.0, 4.0, 3.0, 2.0, 1.0], false),
        // Equal elements that are not taken change nothing.
        ([5.0, 4.0, 1.0, 1.0, 1.0], false),
        ([5.0, 5.0, 3.0, 2.0, 1.0], true),
        ([5.0, 3.0, 1.0, 3.0, 1.0], true),
        ([1.0, 0.0, -0.0, -2.0, -1.0], true),
    ] {
        let x = Tensor::from_slice(&[[9.0f32, 8.0, 7.0, 6.0, 5.0], row].concat()).reshape([2, 5]);
        let run = Program::new(&graph)
            .unwrap()
            .run(&BTreeMap::from([("x".into(), x)]))
            .unwrap();
        assert_eq!(!run.ties.is_empty(), tied, "{row:?}");
    }
}

/// Along the last axis, libtorch adds 16-bit numbers in float32 buffers, which the predicted peak does not count.
#[test]
fn gradients_of_lookups_take_what_is_predicted_along_every_axis() {
    torch::alone();
    for dtype in ["bf16", "f16", "f32"] {
        for (axis, table, dy) in [
            (0, "[6]", vec![3]),
            (0, "[6, 2]", vec![3, 2]),
            (1, "[2, 6]", vec![2, 3]),
            (1, "[2, 6, 4]", vec![2, 3, 4]),
        ] {
            let rank = table.split(',').count();
            let source = format!(
                "graph @g typed (%dy: {dtype}{dy:?}) -> (%dx) {{
  init %shape : i64[{rank}] = {table}
  init %at : i64[3] = [5, 0, 5]
  %dx = GatherGrad %shape, %at, %dy {{axis={axis}}} : {dtype}{table}
}}
"
            );
            let graph = ckpt_passes::text::parse(&source).unwrap();
            let kind = convert::kind(graph.ty(graph.inputs()[0]).dtype).unwrap();
            let dy = Tensor::ones(dy, (kind, tch::Device::Cpu));
            let given = BTreeMap::from([("dy".to_string(), dy)]);
            let run = Program::new(&graph).unwrap().run(&given).unwrap();
            let sizes = Sizes::new(&graph, &Binding::new(&graph, &[]).unwrap()).unwrap();
            let predicted = MemoryProfile::new(&graph, &sizes).unwrap().peak_bytes;
            assert_eq!(run.peak_bytes, predicted, "{dtype} {table} axis {axis}");
        }
    }
}
