//! On the fixtures, in float32 and bfloat16: recomputation changes no bit, and what is measured is what was predicted.
#![cfg(feature = "torch")]

mod torch;

use ckpt_opt::frontend;
use ckpt_opt::runtime::{convert, executor::Program};
use ckpt_passes::analysis::{Binding, MemoryProfile, Sizes};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, ValueId};
use ckpt_passes::plan::Policy;
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
        policy,
        dims: vec![("batch".into(), BATCH), ("seq".into(), SEQ)],
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default())
        .unwrap_or_else(|e| panic!("{model}: {e}"));
    (graph, done.made.unwrap().binding)
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
    let _turn = torch::alone();
    let policies = [
        Policy::None,
        Policy::Full,
        Policy::Selective,
        Policy::Every(2),
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
    let _turn = torch::alone();
    let without_attention = Policy::parse("parts:mlp,norm").unwrap();
    let policies = [
        Policy::None,
        Policy::Full,
        without_attention,
        Policy::Selective,
        Policy::Every(2),
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
    let _turn = torch::alone();
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
        Policy::None,
        Policy::Full,
        parts("mlp,norm"),
        parts("core-attn"),
        Policy::Selective,
    ];
    for (what, layers) in stacks {
        for per_reader in [false, true] {
            let peaks = same_under(what, &policies, &|policy| {
                let mut graph = sharing(&layers, per_reader);
                let request = Request {
                    loss: Loss::Vjp,
                    policy,
                    dims: vec![("b".into(), BATCH), ("s".into(), SEQ)],
                    ..Request::default()
                };
                let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
                (graph, done.made.unwrap().binding)
            });
            assert!(
                peaks[1] < peaks[2] && peaks[2] < peaks[0] && peaks[3] < peaks[0],
                "{what}: {peaks:?}"
            );
        }
    }
}
