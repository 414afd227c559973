//! Layers, plans and predicted memory on the fixtures: real exports of real architectures.

use ckpt_opt::frontend;
use ckpt_passes::analysis::{Binding, Blocks, MemoryProfile, Sizes};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Made;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, Loc};
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::{infer::infer, loss::Loss, remat::strip_again};
use std::path::Path;
use std::sync::Arc;

const MODELS: &[(&str, &str)] = &[
    ("gpt2", "causal-lm"),
    ("bert", "cross-entropy"),
    ("llama32", "causal-lm"),
    ("llama32_mask", "causal-lm"),
    ("llama32_bf16", "causal-lm"),
];

fn load(model: &str) -> Graph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(model)
        .join("model.onnx");
    frontend::read(&path).unwrap().graph
}

fn compiled(model: &str, loss: &str, policy: Policy) -> (Graph, Made) {
    let mut graph = load(model);
    let request = Request {
        loss: Loss::parse(loss).unwrap(),
        policy,
        dims: vec![("batch".into(), 4), ("seq".into(), 64)],
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default())
        .unwrap_or_else(|e| panic!("{model}: {e}"));
    (graph, done.made.unwrap())
}

fn peak(graph: &Graph, binding: &Binding) -> u64 {
    let sizes = Sizes::new(graph, binding).unwrap();
    MemoryProfile::new(graph, &sizes).unwrap().peak_bytes
}

#[test]
fn two_equal_layers_in_every_fixture_names_or_not() {
    for (model, _) in MODELS {
        let mut graph = load(model);
        infer(&mut graph).unwrap();
        let named = Blocks::new(&graph).unwrap();
        assert_eq!(named.list.len(), 2, "{model}");
        assert_eq!(
            named.list[0].nodes.len(),
            named.list[1].nodes.len(),
            "{model}"
        );
        for block in &named.list {
            assert_eq!(block.kind, "attention+mlp", "{model}");
            assert_eq!(block.run, 0);
        }
        // The second layer reads what closes the first, before anything else.
        let stream = graph.node(named.list[0].last).outs[0];
        assert_eq!(named.list[1].inputs[0], stream, "{model}");
        let classes: Vec<_> = named.list.iter().map(|b| b.class.clone()).collect();
        let paths: Vec<_> = named.list.iter().map(|b| b.path.clone()).collect();
        assert!(
            paths[0].is_some() && paths[0] != paths[1],
            "{model}: {paths:?}"
        );
        assert!(
            classes[0].is_some() && classes[0] == classes[1],
            "{model}: {classes:?}"
        );

        for id in graph.order().to_vec() {
            graph.set_loc(id, Arc::new(Loc::default()));
        }
        let values: Vec<_> = graph.values().map(|(id, _)| id).collect();
        for (i, id) in values.into_iter().enumerate() {
            graph.rename_value(id, &format!("x{i}"));
        }
        let blind = Blocks::new(&graph).unwrap();
        let members = |b: &Blocks| b.list.iter().map(|b| b.nodes.clone()).collect::<Vec<_>>();
        assert_eq!(members(&blind), members(&named), "{model}");
        assert!(
            blind
                .list
                .iter()
                .all(|b| b.class.is_none() && b.path.is_none())
        );
    }
}

#[test]
fn what_a_plan_predicts_is_the_memory_of_what_it_writes() {
    for (model, loss) in MODELS {
        let unplanned = compiled(model, loss, Policy::None).1.plan.after.peak_bytes;
        for policy in [
            Policy::Full,
            Policy::Selective,
            Policy::Every(2),
            Policy::First(1),
            Policy::Group(2),
        ] {
            let (mut graph, done) = compiled(model, loss, policy);
            let plan = &done.plan;
            assert_eq!(plan.before.peak_bytes, unplanned, "{model} {policy}");
            assert!(plan.after.peak_bytes < unplanned, "{model} {policy}");
            assert_eq!(
                peak(&graph, &done.binding),
                plan.after.peak_bytes,
                "{model} {policy}"
            );
            // A plan may be taken back.
            strip_again(&mut graph);
            assert_eq!(peak(&graph, &done.binding), unplanned, "{model} {policy}");
        }
    }
}

/// Products of activations with weights in a layer, in order, as `selective` decided: kept, recomputed, not needed.
#[test]
fn selective_on_real_layers() {
    let expected: &[(&str, &str)] = &[
        // q, k, v, o, gate, up, down
        ("llama32", "krkrkr-"),
        ("llama32_mask", "krkrkr-"),
        // q, k, v, o, up, down
        ("bert", "krkrkr"),
    ];
    for (model, decisions) in expected {
        let loss = MODELS.iter().find(|(m, _)| m == model).unwrap().1;
        let (graph, done) = compiled(model, loss, Policy::Selective);
        for block in &done.subject.blocks.list {
            let products = block
                .nodes
                .iter()
                .filter(|n| done.subject.blocks.plain_matmul[**n]);
            let found: String = products
                .map(|n| {
                    let name = &graph.node(*n).name;
                    match done.plan.decisions.iter().find(|d| d.name == *name) {
                        Some(d) if d.kept => 'k',
                        Some(_) => 'r',
                        None => '-',
                    }
                })
                .collect();
            assert_eq!(found, *decisions, "{model} layer {}", block.index);
        }
    }
    // Every product of GPT-2 has its bias fused: all that the backward reads are kept.
    let (_, done) = compiled("gpt2", "causal-lm", Policy::Selective);
    let fused: Vec<bool> = done
        .plan
        .decisions
        .iter()
        .filter(|d| d.reason == "a product with a fused bias")
        .map(|d| d.kept)
        .collect();
    assert_eq!(fused, vec![true; fused.len()]);
    assert!(fused.len() >= 4, "{fused:?}");
}

#[test]
fn layers_are_the_same_whatever_is_trained() {
    let mut graph = load("gpt2");
    let mut request = Request {
        loss: Loss::Vjp,
        policy: Policy::Full,
        ..Request::default()
    };
    // Nothing before the first layer's MLP is differentiated: its first norm is not asked for its mean.
    request.selection.trainable = vec!["*mlp*".into()];
    let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
    let made = done.made.unwrap();
    assert_eq!(made.subject.blocks.list.len(), 2);
    assert!(made.plan.after.peak_bytes < made.plan.before.peak_bytes);
}
