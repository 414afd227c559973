//! Layers, plans and predicted memory on the fixtures: real exports of real architectures.

use ckpt_opt::frontend;
use ckpt_passes::analysis::sharing::{KvSharing, Reach};
use ckpt_passes::analysis::{Binding, Layers, MemoryProfile, Sizes};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Planned;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, Loc, NodeId};
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::{infer::infer, loss::Loss, remat::strip_plan};
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

fn load_typed(model: &str) -> Graph {
    let mut graph = load(model);
    infer(&mut graph).unwrap();
    graph
}

fn compiled(model: &str, loss: &str, policy: Policy) -> (Graph, Planned) {
    let mut graph = load(model);
    let request = Request {
        loss: Loss::parse(loss).unwrap(),
        plan: policy.into(),
        dims: vec![("batch".into(), 4), ("seq".into(), 64)],
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default())
        .unwrap_or_else(|e| panic!("{model}: {e}"));
    (graph, done.planned.unwrap())
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
        let named = Layers::new(&graph).unwrap();
        assert_eq!(named.list.len(), 2, "{model}");
        assert_eq!(
            named.list[0].nodes.len(),
            named.list[1].nodes.len(),
            "{model}"
        );
        for block in &named.list {
            assert_eq!(block.kind, "attention+mlp", "{model}");
            assert_eq!(block.repeat, 0);
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
        let blind = Layers::new(&graph).unwrap();
        let members = |b: &Layers| b.list.iter().map(|b| b.nodes.clone()).collect::<Vec<_>>();
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
        let unplanned = compiled(model, loss, Policy::NONE)
            .1
            .outcome
            .plan
            .after
            .peak_bytes;
        for policy in [
            Policy::FULL,
            Policy::SELECTIVE,
            Policy::every(2),
            Policy::first(1),
            Policy::group(2),
        ] {
            let (mut graph, done) = compiled(model, loss, policy);
            let plan = &done.outcome.plan;
            assert_eq!(plan.before.peak_bytes, unplanned, "{model} {policy}");
            assert!(plan.after.peak_bytes < unplanned, "{model} {policy}");
            assert_eq!(
                peak(&graph, &done.binding),
                plan.after.peak_bytes,
                "{model} {policy}"
            );
            // A plan may be taken back.
            strip_plan(&mut graph);
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
        let (graph, done) = compiled(model, loss, Policy::SELECTIVE);
        for block in &done.bound.layers.list {
            let products = block
                .nodes
                .iter()
                .filter(|n| done.bound.layers.plain_matmul[**n]);
            let found: String = products
                .map(|n| {
                    let name = &graph.node(*n).name;
                    match done.outcome.plan.decisions.iter().find(|d| d.name == *name) {
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
    let (_, done) = compiled("gpt2", "causal-lm", Policy::SELECTIVE);
    let fused: Vec<bool> = done
        .outcome
        .plan
        .decisions
        .iter()
        .filter(|d| d.reason == "a product with a fused bias")
        .map(|d| d.kept)
        .collect();
    assert_eq!(fused, vec![true; fused.len()]);
    assert!(fused.len() >= 4, "{fused:?}");
}

/// Layers 0 and 2 attend within a window, 1 and 3 to everything; 2 and 3 read the keys and values of 0 and 1.
#[test]
fn shared_keys_and_values_of_a_real_export() {
    let mut graph = load_typed("gemma3n");
    let map = |graph: &Graph| Layers::new(graph).unwrap().kv_sharing;
    let of = |producer, reach| KvSharing {
        producer: Some(producer),
        consumers: vec![producer + 2],
        reach,
        shared: "keys+values",
    };
    let expected = [of(0, Reach::Sliding), of(1, Reach::Full)];
    assert_eq!(map(&graph), expected);
    for id in graph.order().to_vec() {
        graph.set_loc(id, Arc::new(Loc::default()));
    }
    assert_eq!(map(&graph), expected);
    // Two layers that make keys, two that do not.
    let blocks = Layers::new(&graph).unwrap();
    assert_eq!(blocks.list.len(), 4);
    assert!(blocks.shared_weights.is_empty());
    assert!(
        Layers::new(&load_typed("llama32"))
            .unwrap()
            .kv_sharing
            .is_empty()
    );
}

/// Attention is computed again inside every layer, those that read shared keys included; the keys are not.
#[test]
fn attention_is_recomputed_in_layers_that_share_keys() {
    let (graph, done) = compiled("gemma3n", "vjp", Policy::FULL);
    let blocks = &done.bound.layers;
    let mut softmaxes = [0; 4];
    for id in graph.order() {
        let node = graph.node(*id);
        if let (Some(_), "Softmax") = (node.recompute_of, node.op.name) {
            softmaxes[blocks.of[graph.original(*id)].unwrap()] += 1;
        }
    }
    assert_eq!(softmaxes, [1; 4]);
    for sharing in &blocks.kv_sharing {
        let consumer = &blocks.list[sharing.consumers[0]];
        let makers = consumer.inputs.iter().filter_map(|v| graph.def_node(*v));
        let shared: Vec<NodeId> = makers
            .filter(|n| blocks.of[*n] == sharing.producer)
            .collect();
        assert!(shared.len() >= 2, "{shared:?}");
        for maker in shared {
            let copies = graph
                .order()
                .iter()
                .filter(|n| graph.original(**n) == maker);
            assert_eq!(copies.count(), 1, "{}", graph.node(maker).name);
        }
    }
}

#[test]
fn layers_are_the_same_whatever_is_trained() {
    let mut graph = load("gpt2");
    let mut request = Request {
        loss: Loss::Vjp,
        plan: Policy::FULL.into(),
        ..Request::default()
    };
    // Nothing before the first layer's MLP is differentiated: its first norm is not asked for its mean.
    request.selection.trainable = vec!["*mlp*".into()];
    let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
    let made = done.planned.unwrap();
    assert_eq!(made.bound.layers.list.len(), 2);
    assert!(made.outcome.plan.after.peak_bytes < made.outcome.plan.before.peak_bytes);
}
