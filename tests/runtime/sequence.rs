//! A causal model computed chunk by chunk along its sequence: the gradients of the whole, the same bits under every plan,
//! and a peak that is the predicted one.
use crate::support::torch;

use ckpt_opt::frontend;
use ckpt_opt::runtime::{convert, executor::Program};
use ckpt_opt::tensors::{Tensors, feed::Feed, random};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, Node};
use ckpt_passes::plan::{Budget, Effort, Offload, OffloadSet, PlanRequest, Policy};
use ckpt_passes::testing::mixture_of_experts;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::tile::Tile;
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

const SEQ: i64 = 29;

fn dims() -> Vec<(String, i64)> {
    vec![("batch".into(), 2), ("seq".into(), SEQ)]
}

fn request(loss: &str, chunks: usize, plan: PlanRequest) -> Request {
    Request {
        loss: Loss::parse(loss).unwrap(),
        plan,
        dims: dims(),
        drop_outputs: vec!["logits".into()],
        fuse: true,
        sequence_chunks: chunks,
        ..Request::default()
    }
}

fn compiled(model: &str, loss: &str, chunks: usize, plan: PlanRequest) -> (Graph, Option<u64>) {
    compile_fixture(model, &request(loss, chunks, plan))
}

fn compile_fixture(model: &str, request: &Request) -> (Graph, Option<u64>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("fixtures").join(model).join("model.onnx");
    let mut graph = match model {
        "experts" => mixture_of_experts("  %z = Tanh %y"),
        "experts with biases" => {
            let biased = "  %bias = Gather %biases, %sorted\n  %biased = Add %y, %bias";
            mixture_of_experts(&format!("{biased}\n  %z = Tanh %biased"))
        }
        _ => frontend::read(&path).unwrap().graph,
    };
    let done = compile(&mut graph, request, &mut Watch::default())
        .unwrap_or_else(|e| panic!("{model}: {e}"));
    let peak = done.planned.map(|p| p.outcome.plan.after.peak_bytes);
    (graph, peak)
}

fn run(graph: &Graph) -> (BTreeMap<String, Tensor>, u64) {
    let (outputs, peak_bytes, _) = run_offloading(graph);
    (outputs, peak_bytes)
}

/// Also returns the most bytes outside at once.
fn run_offloading(graph: &Graph) -> (BTreeMap<String, Tensor>, u64, u64) {
    let mut feed = Feed::new(graph, Tensors::new()).unwrap();
    random::fill(graph, &mut feed, &dims(), 7).unwrap();
    let inputs = feed.inputs.iter();
    let inputs = inputs.map(|(n, x)| (n.clone(), convert::tensor(n, x).unwrap()));
    let program = Program::new(graph).unwrap();
    let done = program.run(&inputs.collect()).unwrap();
    let outputs = done.outputs.into_iter().collect();
    (outputs, done.peak_bytes, done.outside_peak_bytes)
}

#[test]
fn chunks_of_the_sequence_make_the_whole() {
    torch::alone();
    // One model of each kind in several numbers of chunks, variants of them in one.
    for (model, loss, counts) in [
        ("gpt2", "causal-lm", &[3][..]),
        ("gpt2_loss", "output:loss", &[2, 7]),
        ("llama32", "causal-lm", &[2, 3, 7]),
        ("llama32_mask", "causal-lm", &[3]),
        ("llama32_lora", "causal-lm", &[3]),
        ("llama32_packed", "causal-lm", &[3]),
        ("gemma3n", "causal-lm", &[2, 3]),
    ] {
        let (whole, _) = run(&compiled(model, loss, 1, Policy::NONE.into()).0);
        for chunks in counts.iter().copied() {
            let what = format!("{model} in {chunks} chunks");
            let (graph, _) = compiled(model, loss, chunks, Policy::NONE.into());
            let (parts, unplanned_peak) = run(&graph);
            torch::assert_within(&parts, &whole, 2e-5, &what);
            let mut outside = Vec::new();
            for plan in plans() {
                let (graph, predicted) = compiled(model, loss, chunks, plan);
                let (planned, peak, outside_bytes) = run_offloading(&graph);
                assert_eq!(Some(peak), predicted, "{what}");
                assert!(peak < unplanned_peak, "{what}");
                outside.push(outside_bytes);
                for (name, x) in &planned {
                    assert!(torch::same_bits(x, &parts[name]), "{what}: {name}");
                }
            }
            assert_eq!(outside[..2], [0, 0], "{what}");
            assert!(outside[2] > 0, "{what}");
        }
    }
}

/// Chunks take their tokens in the old order, the whole sorts them by expert.
#[test]
fn a_mixture_of_experts_is_cut_along_its_sequence() {
    torch::alone();
    for model in ["experts", "experts with biases"] {
        let (whole, _) = run(&compiled(model, "causal-lm", 1, Policy::NONE.into()).0);
        for chunks in [2, 3, 5] {
            let what = format!("{model} in {chunks} chunks");
            let (parts, _) = run(&compiled(model, "causal-lm", chunks, Policy::NONE.into()).0);
            torch::assert_within(&parts, &whole, 2e-5, &what);
            let (graph, predicted) = compiled(model, "causal-lm", chunks, Policy::CHUNKS.into());
            let (planned, peak) = run(&graph);
            assert_eq!(Some(peak), predicted, "{what}");
            for (name, x) in &planned {
                assert!(torch::same_bits(x, &parts[name]), "{what}: {name}");
            }
        }
    }
}

/// The rows of a chunk are sorted as those of the whole.
#[test]
fn experts_are_computed_in_chunks_of_their_rows() {
    torch::alone();
    for (model, biases) in [("experts", 0), ("experts with biases", 3)] {
        let mut request = request("causal-lm", 1, Policy::NONE.into());
        let (whole, _) = run(&compile_fixture(model, &request).0);
        request.tile.mlp = Tile::Chunks(3);
        let (graph, predicted) = compile_fixture(model, &request);
        let nodes = || graph.order().iter().map(|id| graph.node(*id));
        let gradients = nodes().filter(|n| n.op.name == "GroupedWeightGrad").count();
        assert_eq!(gradients, 6, "{model}: two matrices in three chunks");
        let is_of_biases = |n: &&Node| n.op.name == "GatherGrad" && n.name.contains("/tile");
        assert_eq!(nodes().filter(is_of_biases).count(), biases, "{model}");
        let (parts, peak) = run(&graph);
        assert_eq!(Some(peak), predicted, "{model}");
        torch::assert_within(&parts, &whole, 2e-5, model);
    }
}

/// Returns a budget, the policy that keeps what later chunks read, and both with results that wait outside.
fn plans() -> [PlanRequest; 4] {
    let budget = PlanRequest {
        effort: Effort::First,
        ..Budget::Percent(50.0).into()
    };
    let outside = |request: PlanRequest| PlanRequest {
        effort: Effort::First,
        offload: Offload {
            set: OffloadSet::All,
            min_bytes: 64,
            ..Offload::default()
        },
        ..request
    };
    [
        budget,
        Policy::CHUNKS.into(),
        outside(Policy::CHUNKS.into()),
        outside(Budget::Percent(40.0).into()),
    ]
}

#[test]
fn chunks_drop_other_elements_and_copies_the_same() {
    torch::alone();
    let mut request = request("causal-lm", 3, Policy::NONE.into());
    request.lora = Some(Lora {
        rank: 4,
        dropout: 0.5,
        ..Lora::default()
    });
    let (unplanned, _) = run(&compile_fixture("llama32", &request).0);
    for plan in plans() {
        request.plan = plan;
        let (graph, predicted) = compile_fixture("llama32", &request);
        let (planned, peak) = run(&graph);
        assert_eq!(Some(peak), predicted);
        for (name, x) in &planned {
            assert!(torch::same_bits(x, &unplanned[name]), "{name}");
        }
    }
}
