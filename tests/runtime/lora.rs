//! Adapters that we add, on exports of every form: planned and unplanned steps give the same bits in the memory that was
//! predicted, nothing but adapters has a gradient, and merged weights compute what the adapters do.

use crate::support::torch;

use ckpt_opt::export::{Export, Target, checkpoint};
use ckpt_opt::frontend::given::{Given, InputType};
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::{Tensors, random};
use ckpt_passes::analysis::params::Selection;
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph, Role, Tensor};
use ckpt_passes::ops::random::Key;
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::lora::Lora;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Files of every exporter, with targets, settings, and the modules that get an adapter.
const MODELS: [(&str, &str, usize); 6] = [
    ("gpt2/model.onnx", "targets=c_attn,c_proj,c_fc", 8),
    (
        "llama32/model.onnx",
        "dropout=0.2,targets=*q_proj*,*v_proj*",
        4,
    ),
    (
        "llama32_bf16/model.onnx",
        "dtype=f32,targets=q_proj,down_proj",
        4,
    ),
    ("folded/legacy.onnx", "rslora=true,targets=up,*mix*", 0),
    ("exported/block.pt2", "targets=*", 0),
    ("exported/block.pt", "targets=*", 0),
];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

fn given(name: &str) -> Given {
    let types = match name.ends_with("block.pt") {
        true => vec![InputType::parse("tokens:i64[2,7]").unwrap()],
        false => Vec::new(),
    };
    Given {
        inputs: types,
        ..Given::default()
    }
}

fn lora(settings: &str) -> Lora {
    Lora::parse(&format!("r=3,alpha=6,{settings}")).unwrap()
}

fn compiled(name: &str, lora: Option<&Lora>, plan: Policy) -> Graph {
    let mut graph = load(&path(name), &given(name)).unwrap().graph;
    let request = Request {
        plan: plan.into(),
        fuse: true,
        lora: lora.cloned(),
        ..Request::default()
    };
    optimize(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    graph
}

/// Random matrices for all adapters of a graph, so that B is not zero.
fn trained(graph: &Graph) -> Tensors {
    let mut all = Tensors::new();
    for (i, (_, value)) in graph.inits().enumerate() {
        let Some(tensor) = value.tensor().filter(|_| value.name.contains(".lora_")) else {
            continue;
        };
        let key = Key::new(1, i as i64);
        let numbers =
            (0..tensor.elements()).map(|at| f64::from(key.draw(at)) / f64::from(1 << 24) - 0.5);
        let weight = Tensor::rounded(tensor.dtype, &tensor.dims, numbers);
        all.insert(value.name.clone(), weight);
    }
    all
}

fn run(graph: &Graph, weights: &Tensors) -> Measured {
    let dims: BTreeMap<&str, i64> = [("batch", 2), ("seq", 7)].into();
    let named = dim_kinds(graph).into_iter();
    let sizes = named.map(|(name, _)| {
        let size = dims.get(name.as_str()).copied().unwrap_or(5);
        (name, size)
    });
    let inputs = random::inputs(graph, &sizes.collect::<Vec<_>>(), 3).unwrap();
    let session = Session::new(graph, weights, None, Place::Cpu, Rng::default()).unwrap();
    session.run(&inputs).unwrap()
}

#[test]
fn only_adapters_are_trained_and_a_plan_changes_no_bit() {
    torch::alone();
    for (name, settings, count) in MODELS {
        let lora = lora(settings);
        let plain = compiled(name, Some(&lora), Policy::NONE);
        let weights = trained(&plain);
        assert!(
            weights.len() / 2 >= count.max(1),
            "{name}: {}",
            weights.len()
        );
        let expected = run(&plain, &weights);
        assert_eq!(expected.peak_bytes, expected.predicted_peak_bytes, "{name}");
        let outputs = expected.outputs.keys();
        let gradients: BTreeSet<String> = outputs
            .filter_map(|n| n.strip_suffix(".grad").map(str::to_string))
            .collect();
        assert_eq!(gradients, weights.keys().cloned().collect(), "{name}");
        let is_zero = |t: &Tensor| (0..t.elements() as usize).all(|i| t.get_f64(i) == Some(0.0));
        for gradient in &gradients {
            let tensor = &expected.outputs[&format!("{gradient}.grad")];
            assert!(!is_zero(tensor), "{name}: {gradient}");
        }
        let planned = compiled(name, Some(&lora), Policy::parse("selective").unwrap());
        let planned = run(&planned, &weights);
        for (output, tensor) in &expected.outputs {
            let found = &planned.outputs[output];
            let differs = |i: &usize| found.get_f64(*i) != tensor.get_f64(*i);
            let first = (0..tensor.elements() as usize).find(differs);
            let at = first.map(|i| (i, found.get_f64(i), tensor.get_f64(i)));
            assert!(found == tensor, "{name}: {output} differs first at {at:?}");
        }
        assert_eq!(planned.outputs.len(), expected.outputs.len(), "{name}");
        assert_eq!(planned.peak_bytes, planned.predicted_peak_bytes, "{name}");
    }
}

#[test]
fn a_frozen_base_costs_no_gradients_and_less_memory() {
    torch::alone();
    let (name, settings, _) = MODELS[0];
    let full = compiled(name, None, Policy::NONE);
    let adapted = compiled(name, Some(&lora(settings)), Policy::NONE);
    let gradients = |graph: &Graph| {
        let values = graph.values().map(|(_, value)| value.name.clone());
        values
            .filter(|name| name.ends_with(".grad"))
            .collect::<Vec<_>>()
    };
    assert!(gradients(&full).contains(&"transformer.h.0.attn.c_attn.weight.grad".to_string()));
    assert!(
        gradients(&adapted)
            .iter()
            .all(|name| name.contains(".lora_"))
    );
    let none = Tensors::new();
    let (full, adapted) = (run(&full, &none), run(&adapted, &none));
    let above_static = |run: &Measured| run.peak_bytes - run.static_bytes;
    assert!(above_static(&adapted) < above_static(&full));
}

#[test]
fn what_the_user_names_is_trained_too_and_freeze_wins() {
    let mut graph = load(&path("llama32/model.onnx"), &Given::default())
        .unwrap()
        .graph;
    let words = |words: &[&str]| words.iter().map(|w| w.to_string()).collect();
    let request = Request {
        plan: Policy::NONE.into(),
        lora: Some(lora("targets=q_proj")),
        selection: Selection {
            trainable: words(&["*input_layernorm*"]),
            freeze: words(&["*layers.1.*"]),
        },
        ..Request::default()
    };
    optimize(&mut graph, &request, &mut Watch::default()).unwrap();
    let outputs = graph.outputs().iter();
    let names = outputs.map(|v| graph.value(*v).name.clone());
    let gradients: BTreeSet<String> = names.filter(|n| n.ends_with(".grad")).collect();
    let expected = [
        "model.layers.0.input_layernorm.weight.grad",
        "model.layers.0.self_attn.q_proj.lora_A.weight.grad",
        "model.layers.0.self_attn.q_proj.lora_B.weight.grad",
    ];
    assert_eq!(gradients, expected.map(String::from).into());
    // The graph that holds its backward takes no more adapters.
    let again = optimize(&mut graph, &request, &mut Watch::default())
        .err()
        .unwrap();
    assert_eq!((again.code(), again.exit_code()), ("lora", 2));
}

#[test]
fn no_product_of_the_backward_pass_is_for_the_base() {
    let (name, settings, _) = MODELS[1];
    let graph = compiled(name, Some(&lora(settings)), Policy::NONE);
    let sizes: BTreeSet<Vec<u64>> = graph
        .inits()
        .filter_map(|(_, v)| v.tensor().map(|t| t.dims.clone()))
        .filter(|dims| dims.len() == 2 && dims.iter().all(|d| *d > 3))
        .collect();
    for (id, node) in graph.nodes() {
        if node.role == Role::Backward && node.op.name == "MatMul" {
            let dims = graph.ty(node.outs[0]).static_dims();
            let dims = dims.map(|d| d.iter().map(|n| *n as u64).collect::<Vec<_>>());
            assert!(
                dims.is_none_or(|d| !sizes.contains(&d)),
                "{}",
                graph.describe(id)
            );
        }
    }
}

/// The outputs of a forward graph.
fn forward(path: &Path) -> Measured {
    let mut graph = load(path, &given(&path.display().to_string()))
        .unwrap()
        .graph;
    infer(&mut graph).unwrap();
    run(&graph, &Tensors::new())
}

#[test]
fn merged_weights_compute_what_the_adapters_do() {
    torch::alone();
    let folder = tempfile::tempdir().unwrap();
    for (name, settings, _) in MODELS {
        let lora = lora(&settings.replace("dropout=0.2,", ""));
        let graph = compiled(name, Some(&lora), Policy::NONE);
        let weights = trained(&graph);
        let adapted = run(&graph, &weights);
        let export = Export::new(&path(name), &given(name), &weights, Some(&lora)).unwrap();
        assert_eq!(export.counts(), (0, weights.len() / 2), "{name}");
        let file = folder.path().join("merged.onnx");
        export.write(Target::Onnx, &file).unwrap();
        let merged = forward(&file);
        let plain = forward(&path(name));
        let half = graph.inits().any(|(_, v)| v.ty().dtype == DType::BF16);
        let mut compared = 0;
        for (output, tensor) in &merged.outputs {
            let (own, before) = (&adapted.outputs[output], &plain.outputs[output]);
            let numbers = |t: &Tensor| -> Vec<f64> {
                (0..t.elements() as usize)
                    .map(|i| t.get_f64(i).unwrap())
                    .collect()
            };
            let (a, b, c) = (numbers(own), numbers(tensor), numbers(before));
            let largest = a.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let apart = |x: &[f64], y: &[f64]| {
                x.iter()
                    .zip(y)
                    .fold(0.0f64, |m, (x, y)| m.max((x - y).abs()))
            };
            let allowed = if half { 0.05 } else { 2e-5 } * largest;
            assert!(
                apart(&a, &b) <= allowed,
                "{name} {output}: {} of {allowed}",
                apart(&a, &b)
            );
            // The adapters change what the model computes.
            compared += usize::from(apart(&a, &c) > 2.0 * allowed);
        }
        assert!(compared > 0, "{name}");
        // The same through PEFT's folder and through a file of all parameters.
        let expected = std::fs::read(&file).unwrap();
        let again = folder.path().join("again.onnx");
        for target in [Target::Peft, Target::Safetensors] {
            let kept = folder.path().join(match target {
                Target::Peft => "adapter",
                _ => "all.safetensors",
            });
            export.write(target, &kept).unwrap();
            let read = checkpoint::read(&kept).unwrap();
            let tensors = &read.tensors;
            let back = Export::new(&path(name), &given(name), tensors, read.lora.as_ref()).unwrap();
            back.write(Target::Onnx, &again).unwrap();
            assert!(
                std::fs::read(&again).unwrap() == expected,
                "{name} {target:?}"
            );
        }
    }
}
