//! Adapters beside quantised weights: their gradients are PyTorch's on the dequantised weights, a step takes the memory that was
//! predicted, weights count as they lie in the file, and a plan changes no bit.

use crate::support::torch::{self, assert_close, largest};

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::{Tensors, read};
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::ops::quantised::DEQUANTIZE;
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::loss::Loss;
use std::path::{Path, PathBuf};

/// Each form, and the bytes of its codes, scales and zero points: 2 layers, each with 7680 linear weights.
const FORMS: [(&str, u64); 4] = [
    // Half a byte a weight, and for 16 of them a scale and half a byte. 32 rows of three zero points take two bytes each.
    ("nbits", 2 * (7680 / 2 + 7680 / 16 * 4 + 7680 / 32 + 16)),
    ("blocked", 2 * (7680 / 2 + 7680 / 16 * 4 + 7680 / 32)),
    // A byte a weight, and a scale for each of 224 columns.
    ("channel", 2 * (7680 + 224 * 4)),
    // Half a byte a weight, a scale for 16 of them, and a table for each of 7 weights.
    ("nf4", 2 * (7680 / 2 + 7680 / 16 * 4 + 7 * 16 * 4)),
];

fn path(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/qlora");
    fixtures.join(name)
}

fn compiled(form: &str, plan: Policy, fuse: bool) -> Graph {
    let file = path(&format!("{form}.onnx"));
    let mut graph = load(&file, &Given::default()).unwrap().graph;
    let lora = Lora::parse("r=4,alpha=8,targets=q_proj,v_proj,down_proj").unwrap();
    let request = Request {
        plan: plan.into(),
        fuse,
        lora: Some(lora),
        loss: Loss::parse("causal-lm").unwrap(),
        ..Request::default()
    };
    optimize(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{form}: {e}"));
    graph
}

fn run(graph: &Graph, case: &Tensors) -> Measured {
    let is_adapter = |name: &str| name.contains(".lora_");
    let part = |adapters: bool| -> Tensors {
        let all = case.iter().filter(|(name, _)| is_adapter(name) == adapters);
        all.map(|(name, t)| (name.trim_start_matches("in.").to_string(), t.clone()))
            .collect()
    };
    let session = Session::new(graph, &part(true), None, Place::Cpu, Rng::default()).unwrap();
    session.run(&part(false)).unwrap()
}

#[test]
fn adapters_beside_packed_weights_have_the_gradients_of_pytorch() {
    torch::alone();
    let case = read(&path("case.npz")).unwrap();
    for (form, packed_bytes) in FORMS {
        let expected = read(&path(&format!("{form}.npz"))).unwrap();
        let plain = compiled(form, Policy::NONE, true);
        let dequantised = |graph: &Graph| {
            let nodes = graph.order().iter().map(|id| graph.node(*id));
            nodes.filter(|n| n.op == &DEQUANTIZE).count()
        };
        assert!(dequantised(&plain) >= 14, "{form}: {}", dequantised(&plain));
        let one = run(&plain, &case);
        let gradients: Vec<&String> = expected.keys().filter(|n| n.contains(".lora_")).collect();
        assert_eq!(gradients.len(), 12);
        let floor = 1e-7
            * gradients
                .iter()
                .map(|n| largest(&expected[*n]))
                .fold(0.0, f64::max);
        for name in gradients {
            let found = &one.outputs[&format!("{name}.grad")];
            assert_close(&format!("{form}: {name}"), found, &expected[name], floor);
        }
        assert_close(
            form,
            &one.outputs["loss"],
            &expected["loss.causal_lm"],
            1e-6,
        );
        assert_close(form, &one.outputs["logits"], &expected["out.logits"], 1e-6);
        let tensors = plain
            .inits()
            .filter(|(_, v)| v.name.contains("_proj.weight"));
        let tensors = tensors.filter_map(|(_, v)| v.tensor());
        // Not sizes and shifts, with which nodes unpack.
        let weights: u64 = tensors
            .filter(|t| t.elements() > 4)
            .map(Tensor::size_bytes)
            .sum();
        assert_eq!(weights, packed_bytes, "{form}: bytes of weights");
        for (policy, fuse) in [
            ("none", true),
            ("selective", true),
            ("none", false),
            ("full", true),
        ] {
            let graph = compiled(form, Policy::parse(policy).unwrap(), fuse);
            let run = run(&graph, &case);
            assert_eq!(run.peak_bytes, run.predicted_peak_bytes, "{form}: {policy}");
            let is_same = run.outputs == one.outputs;
            assert!(is_same || !fuse, "{form}: {policy} changes bits");
        }
    }
}
