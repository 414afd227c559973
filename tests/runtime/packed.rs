//! Eight documents packed into two rows. The graph has no value of tokens × tokens, although the exporter wrote such a mask. The
//! gradients equal those of eight runs with one document each, under any plan, and the peak equals the predicted one.

use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::{Tensors, read};
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph, Tensor};
use ckpt_passes::ops::attention::{ATTENTION, ATTENTION_GRAD, GRAD_SEGMENTS, SEGMENTS};
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::loss::Loss;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const FILES: [&str; 2] = ["model.onnx", "program.pt2"];

fn path(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/llama32_packed");
    fixtures.join(name)
}

fn compiled(file: &str, policy: &str, fuse: bool) -> Graph {
    let mut graph = load(&path(file), &Given::default()).unwrap().graph;
    let request = Request {
        plan: Policy::parse(policy).unwrap().into(),
        fuse,
        loss: Loss::parse("causal-lm").unwrap(),
        ..Request::default()
    };
    optimize(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{file}: {e}"));
    graph
}

fn run(graph: &Graph, inputs: &Tensors) -> Measured {
    let none = Tensors::new();
    let session = Session::new(graph, &none, None, Place::Cpu, Rng::default()).unwrap();
    session.run(inputs).unwrap()
}

/// Inputs by the names of the graph's inputs, whatever names an exporter gave the two.
fn inputs(case: &Tensors) -> Tensors {
    let named = |name: &str| case[name].clone();
    Tensors::from([
        ("input_ids".to_string(), named("in.input_ids")),
        ("position_ids".to_string(), named("in.position_ids")),
        ("labels".to_string(), named("labels")),
    ])
}

/// Values with two axes of as many elements as a row has tokens.
fn squares(graph: &Graph) -> Vec<String> {
    let tokens = graph.ty(graph.inputs()[0]).dims[1].clone();
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let values = nodes.flat_map(|node| &node.outs);
    let is_square = |v: &&_| {
        let dims = &graph.ty(**v).dims;
        dims.iter().filter(|d| **d == tokens).count() > 1
    };
    let squares = values.filter(is_square);
    squares.map(|v| graph.value(*v).name.clone()).collect()
}

/// The rows of `x` that `span` of row `row` holds: one document.
fn document(x: &Tensor, row: usize, span: std::ops::Range<usize>) -> Tensor {
    let count = x.dims[1] as usize;
    let bytes: Vec<u8> = span
        .clone()
        .flat_map(|t| x.get_i64(row * count + t).unwrap().to_le_bytes())
        .collect();
    Tensor::new(DType::I64, vec![1, span.len() as u64], bytes)
}

/// The loss and the gradients: a mean over tokens.
fn is_learned(name: &str) -> bool {
    name == "loss" || name.ends_with(".grad")
}

fn numbers(x: &Tensor) -> Vec<f64> {
    let all = 0..x.elements() as usize;
    all.map(|i| x.get_f64(i).unwrap()).collect()
}

/// Where documents lie: their row, their tokens.
fn documents(positions: &Tensor) -> Vec<(usize, std::ops::Range<usize>)> {
    let (rows, count) = (positions.dims[0] as usize, positions.dims[1] as usize);
    let mut found: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
    for (row, t) in (0..rows).flat_map(|row| (0..count).map(move |t| (row, t))) {
        match positions.get_i64(row * count + t) {
            Some(0) => found.push((row, t..t + 1)),
            _ => found.last_mut().unwrap().1.end = t + 1,
        }
    }
    found
}

#[test]
fn no_value_of_tokens_by_tokens_is_left() {
    for file in FILES {
        assert!(!squares(&compiled(file, "none", false)).is_empty());
        let graph = compiled(file, "none", true);
        assert_eq!(squares(&graph), [""; 0], "{file}");
        let mut counts = [0, 0];
        for id in graph.order() {
            let node = graph.node(*id);
            for (i, (op, slot)) in [(&ATTENTION, SEGMENTS), (&ATTENTION_GRAD, GRAD_SEGMENTS)]
                .into_iter()
                .enumerate()
            {
                if node.op == op {
                    assert_eq!(node.attrs.int("causal"), 1, "{file}");
                    assert!(node.operand(slot).is_some(), "{file}");
                    counts[i] += 1;
                }
            }
        }
        assert_eq!(counts, [2, 2], "{file}");
    }
}

#[test]
fn packed_documents_train_as_documents_alone() {
    torch::alone();
    let inputs = inputs(&read(&path("case.npz")).unwrap());
    let found = documents(&inputs["position_ids"]);
    assert_eq!(found.len(), 8);
    for file in FILES {
        let plain = compiled(file, "none", true);
        let packed = run(&plain, &inputs);
        let mut sums: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let learned: usize = found.iter().map(|(_, span)| span.len() - 1).sum();
        for (row, span) in &found {
            let alone = inputs
                .iter()
                .map(|(name, x)| (name.clone(), document(x, *row, span.clone())))
                .collect();
            let share = (span.len() - 1) as f64 / learned as f64;
            let outputs = run(&plain, &alone).outputs;
            for (name, x) in outputs.iter().filter(|(name, _)| is_learned(name)) {
                let sum = sums
                    .entry(name.clone())
                    .or_insert_with(|| vec![0.0; x.elements() as usize]);
                for (to, from) in sum.iter_mut().zip(numbers(x)) {
                    *to += share * from;
                }
            }
        }
        let most = |x: &[f64]| x.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let largest = sums.values().map(|x| most(x)).fold(0.0, f64::max);
        assert!(sums.len() > 10, "{:?}", sums.keys());
        for (name, expected) in &sums {
            let found = numbers(&packed.outputs[name]);
            let allowed = 1e-5 * most(expected) + 1e-7 * largest;
            let gaps: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
            assert!(
                most(&gaps) <= allowed,
                "{file}: {name} differs by {}",
                most(&gaps)
            );
        }
    }
}

#[test]
fn plans_change_no_bit_and_take_what_was_predicted() {
    torch::alone();
    let inputs = inputs(&read(&path("case.npz")).unwrap());
    for file in FILES {
        let one = run(&compiled(file, "none", true), &inputs);
        for policy in ["none", "selective", "full"] {
            let run = run(&compiled(file, policy, true), &inputs);
            assert_eq!(run.peak_bytes, run.predicted_peak_bytes, "{file}: {policy}");
            assert!(run.outputs == one.outputs, "{file}: {policy} changes bits");
        }
    }
}
