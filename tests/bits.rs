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
        _ => ((i * 7 + 3) % 29) as f64,
    };
    let values: Vec<f64> = (0..n).map(token).collect();
    torch::tensor(graph.ty(id).dtype, dims, &values)
}

#[test]
fn planned_equals_unplanned_on_the_fixtures() {
    let _turn = torch::alone();
    for (model, loss) in [
        ("llama32_bf16", "causal-lm"),
        ("llama32", "causal-lm"),
        ("gpt2", "causal-lm"),
        ("bert", "cross-entropy"),
    ] {
        let mut expected: Option<BTreeMap<String, Tensor>> = None;
        for policy in [
            Policy::None,
            Policy::Full,
            Policy::Selective,
            Policy::Every(2),
        ] {
            let (graph, binding) = compiled(model, loss, policy);
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
                .unwrap_or_else(|e| panic!("{model} {policy}: {e}"));
            let at = |bytes: u64| bytes - run.static_bytes;
            assert_eq!(
                at(run.peak_bytes),
                predicted.peak_bytes - predicted.static_bytes,
                "{model} {policy}: measured and predicted peak above static; at {:?} and {:?}",
                run.peak_at,
                predicted.at.map(|id| graph.node(id).name.clone())
            );
            let found: BTreeMap<String, Tensor> = run.outputs.into_iter().collect();
            let gradients = found.keys().filter(|name| name.ends_with(".grad")).count();
            assert!(gradients > 10, "{model}: {gradients} gradients");
            let Some(expected) = &expected else {
                for (name, x) in &found {
                    assert!(convert::dtype(x.kind()).is_some());
                    let finite = x.to_kind(tch::Kind::Double).isfinite().all();
                    assert!(
                        bool::try_from(finite).unwrap(),
                        "{model}: `{name}` is not finite"
                    );
                }
                expected = Some(found);
                continue;
            };
            assert!(expected.keys().eq(found.keys()));
            for (name, x) in &found {
                assert!(
                    torch::same_bits(x, &expected[name]),
                    "{model} {policy}: `{name}`"
                );
            }
        }
    }
}
