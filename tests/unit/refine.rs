//! Policies refined: layers by class or path, ops in ONNX and ATen spelling, modules by path, parts of layers, frozen
//! layers. On the fixtures: real exports with the names that their exporter left.

use ckpt_opt::frontend;
use ckpt_passes::Result;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::{Planned, Watch};
use ckpt_passes::ir::{Graph, Node, NodeId, Role};
use ckpt_passes::plan::{Constraint, Policy};
use ckpt_passes::planning::overrides::{NamePattern, Override, PolicyOverrides, Target};
use ckpt_passes::transform::loss::Loss;
use std::collections::BTreeSet;
use std::path::Path;

fn load(model: &str) -> Graph {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    frontend::read(&root.join(model).join("model.onnx"))
        .unwrap()
        .graph
}

fn request(policy: Policy, overrides: PolicyOverrides) -> Request {
    Request {
        loss: Loss::Vjp,
        plan: policy.into(),
        overrides,
        dims: vec![("batch".into(), 4), ("seq".into(), 64)],
        ..Request::default()
    }
}

fn planned(model: &str, request: &Request) -> Result<(Graph, Planned)> {
    let mut graph = load(model);
    let done = compile(&mut graph, request, &mut Watch::default())?;
    Ok((graph, done.planned.unwrap()))
}

fn names(texts: &[&str]) -> Vec<NamePattern> {
    let parse = |t: &&str| NamePattern::parse(t).unwrap();
    texts.iter().map(parse).collect()
}

fn layers(texts: &[&str]) -> PolicyOverrides {
    PolicyOverrides {
        layers: names(texts),
        ..PolicyOverrides::default()
    }
}

fn overrides(list: &[(Constraint, Target)]) -> PolicyOverrides {
    let over = |(constraint, target): &(Constraint, Target)| Override {
        constraint: *constraint,
        target: target.clone(),
    };
    PolicyOverrides {
        overrides: list.iter().map(over).collect(),
        ..PolicyOverrides::default()
    }
}

fn copies(graph: &Graph) -> Vec<&Node> {
    let nodes = graph.nodes().map(|(_, n)| n);
    nodes.filter(|n| n.recompute_of.is_some()).collect()
}

fn copied(graph: &Graph) -> BTreeSet<String> {
    copies(graph).iter().map(|n| n.name.clone()).collect()
}

fn paths_of(node: &Node) -> Vec<&str> {
    let scopes = node.loc.scopes.iter();
    scopes.map(|(path, _)| path.as_str()).collect()
}

#[test]
fn layers_by_class_and_by_path() {
    for (model, wish, inside, modules) in [
        ("gpt2", "GPT2Block", "transformer.h.", 2),
        ("gpt2", "GPT2MLP", ".mlp", 2),
        ("llama32", "LlamaMLP", ".mlp", 2),
        ("llama32", "model.layers.*.mlp", ".mlp", 2),
        (
            "llama32",
            "layers.1.self_attn",
            "model.layers.1.self_attn",
            1,
        ),
        (
            "bert",
            "transformers.models.bert.BertLayer",
            "bert.encoder.layer.",
            2,
        ),
        ("bert", "Bert*Output", "output", 4),
    ] {
        let (graph, made) = planned(model, &request(Policy::FULL, layers(&[wish]))).unwrap();
        let mut found = BTreeSet::new();
        for node in copies(&graph) {
            let scopes = paths_of(node);
            // What the exporter says nothing about belongs to its readers.
            let own = scopes.iter().find(|p| p.contains(inside));
            assert!(
                own.is_some() || scopes.is_empty(),
                "{model} {wish}: {}",
                node.name
            );
            found.extend(own.map(|p| p.to_string()));
        }
        assert!(!found.is_empty(), "{model} {wish}");
        let segments = made.outcome.plan.segments.len();
        assert!(
            segments <= modules && segments > 0,
            "{model} {wish}: {segments}"
        );
        assert!(
            made.outcome
                .plan
                .policy
                .ends_with(&format!("--layers {wish}"))
        );
    }
    // The class of the layers is what the dataflow finds: the same plan.
    let by_class = planned(
        "llama32",
        &request(Policy::FULL, layers(&["LlamaDecoderLayer"])),
    )
    .unwrap();
    let by_flow = planned(
        "llama32",
        &request(Policy::FULL, PolicyOverrides::default()),
    )
    .unwrap();
    let peak = |made: &Planned| made.outcome.plan.after.peak_bytes;
    assert!(peak(&by_class.1).abs_diff(peak(&by_flow.1)) * 20 < peak(&by_flow.1));
    // Counting starts anew among what was asked for.
    let mut overrides = layers(&["LlamaMLP"]);
    overrides.first = Some(1);
    let (graph, _) = planned("llama32", &request(Policy::FULL, overrides)).unwrap();
    for node in copies(&graph) {
        assert!(
            paths_of(node).contains(&"model.layers.0.mlp"),
            "{}",
            node.name
        );
    }
}

#[test]
fn an_unknown_class_lists_those_that_exist() {
    for (wish, near) in [
        ("LlamaMPL", "LlamaMLP (2)"),
        ("GPT2Block", "LlamaAttention (2)"),
    ] {
        let e = planned("llama32", &request(Policy::FULL, layers(&[wish])))
            .err()
            .unwrap();
        assert_eq!((e.code(), e.exit_code()), ("selection", 2));
        let text = e.to_string();
        assert!(
            text.contains(near) && text.contains("model.layers.0.mlp"),
            "{text}"
        );
    }
    let e = planned("llama32", &request(Policy::FULL, layers(&["LlamaMPL"])))
        .err()
        .unwrap();
    assert!(
        e.to_string().contains("classes LlamaMLP (2), "),
        "the near miss comes first: {e}"
    );
}

#[test]
fn a_product_in_every_spelling() {
    let plan = |text: &str, choice| {
        let overrides = overrides(&[(choice, Target::op(text).unwrap())]);
        planned("llama32", &request(Policy::FULL, overrides)).map(|(graph, _)| copied(&graph))
    };
    let full = planned(
        "llama32",
        &request(Policy::FULL, PolicyOverrides::default()),
    )
    .unwrap();
    let products = |names: &BTreeSet<String>| {
        names
            .iter()
            .filter(|n| n.starts_with("node_linear") || n.starts_with("node_MatMul"))
            .count()
    };
    assert!(products(&copied(&full.0)) > 8);
    let by_onnx = plan("MatMul", Constraint::Keep).unwrap();
    assert_eq!(products(&by_onnx), 0);
    for text in [
        "aten.mm",
        "aten.mm.default",
        "torch.ops.aten.mm.default",
        "aten::mm",
    ] {
        assert_eq!(plan(text, Constraint::Keep).unwrap(), by_onnx, "{text}");
    }
    // What the exporter traced a node from is known to the overload.
    let linear = plan("torch.ops.aten.linear.default", Constraint::Keep).unwrap();
    assert!(linear.iter().all(|n| !n.starts_with("node_linear")));
    let silu = plan("aten.silu", Constraint::Keep).unwrap();
    assert!(silu.len() < copied(&full.0).len());
    let attention = plan("aten.scaled_dot_product_attention", Constraint::Keep).unwrap();
    assert!(attention.iter().all(|n| !n.starts_with("node_Softmax")));
    for (text, part) in [
        ("aten.topk", "the model has no op that aten.topk becomes"),
        ("aten.matmull", "aten.matmul"),
        ("TopK", "the model has no TopK"),
        ("MatMull", "did you mean MatMul?"),
        ("*nothing*", "matches no node"),
        ("__import__", "no op and no node has that name"),
    ] {
        for choice in [Constraint::Keep, Constraint::Recompute] {
            let e = plan(text, choice).err().unwrap_or_else(|| panic!("{text}"));
            assert_eq!((e.code(), e.exit_code()), ("selection", 2), "{text}");
            assert!(e.to_string().contains(part), "{text}: {e}");
            assert!(e.to_string().contains("found: "), "{text}: {e}");
        }
    }
}

#[test]
fn only_the_modules_that_are_named_run_again() {
    let router = Target::module("layers.1.mlp.gate_proj").unwrap();
    let routers = overrides(&[(Constraint::Recompute, router)]);
    let (graph, made) = planned("llama32", &request(Policy::NONE, routers)).unwrap();
    let list = copies(&graph);
    assert!(!list.is_empty());
    for node in list {
        assert!(
            paths_of(node).contains(&"model.layers.1.mlp.gate_proj"),
            "{}",
            node.name
        );
    }
    for decision in &made.outcome.plan.decisions {
        assert_eq!(
            decision.kept,
            !decision.reason.starts_with("--recompute"),
            "{}",
            decision.name
        );
    }
    // The last wish about an op wins.
    let save = (Constraint::Keep, Target::op("MatMul").unwrap());
    let again = (Constraint::Recompute, Target::module("gate_proj").unwrap());
    let count = |list: &[(Constraint, Target)]| {
        let (graph, _) = planned("llama32", &request(Policy::NONE, overrides(list))).unwrap();
        copies(&graph).len()
    };
    assert_eq!(count(&[again.clone(), save.clone()]), 0);
    assert_eq!(count(&[save, again]), 2);
}

#[test]
fn a_scope_restricts_policies_and_op_rules() {
    let scope = |text: &str| PolicyOverrides {
        scope: names(&[text]),
        ..overrides(&[(Constraint::Recompute, Target::op("MatMul").unwrap())])
    };
    let (graph, _) = planned(
        "llama32",
        &request(Policy::SELECTIVE, scope("model.layers.1")),
    )
    .unwrap();
    let list = copies(&graph);
    assert!(list.iter().any(|n| n.op.name == "MatMul"));
    for node in list {
        let inside = paths_of(node).contains(&"model.layers.1") || paths_of(node).is_empty();
        assert!(inside, "{}", node.name);
    }
    for (text, part) in [
        ("model.layers.7", "matches no module and no node"),
        ("lm_head", "no layer lies in"),
    ] {
        let e = planned("llama32", &request(Policy::SELECTIVE, scope(text)))
            .err()
            .unwrap();
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn parts_of_layers() {
    let pre: &[&str] = &["norm", "attention", "norm", "mlp"];
    let post: &[&str] = &["attention", "norm", "mlp", "norm"];
    for (model, expected) in [
        ("gpt2", pre),
        ("llama32", pre),
        ("llama32_mask", pre),
        ("llama32_bf16", pre),
        ("bert", post),
    ] {
        let (graph, made) = planned(
            model,
            &request(Policy::SUBMODULE, PolicyOverrides::default()),
        )
        .unwrap();
        let parts = &made.bound.sub_blocks.list;
        for block in 0..2 {
            let words: Vec<&str> = parts
                .iter()
                .filter(|p| p.layer == block)
                .map(|p| p.kind.word())
                .collect();
            assert_eq!(words, expected, "{model}");
        }
        let softmax = |n: &ckpt_passes::ir::NodeId| graph.node(*n).op.name == "Softmax";
        let inside = parts.iter().filter(|p| p.nodes.iter().any(softmax));
        assert!(
            inside.into_iter().all(|p| p.kind.word() == "attention"),
            "{model}"
        );
        // Names only label: an attention is called after the module it came from.
        let named = parts.iter().filter(|p| p.kind.word() == "attention");
        for part in named {
            let path = part.path.as_deref().unwrap_or("");
            assert!(
                path.contains("attn") || path.contains("attention"),
                "{model}: {path}"
            );
        }
        // Every part keeps its input, so more stays than when a layer keeps only its own.
        let full = planned(model, &request(Policy::FULL, PolicyOverrides::default()))
            .unwrap()
            .1;
        let (mine, whole) = (
            made.outcome.plan.recompute_flops(),
            full.outcome.plan.recompute_flops(),
        );
        assert!(mine > 0 && mine <= whole, "{model}: {mine} {whole}");
        assert!(
            made.outcome.plan.after.peak_bytes <= made.outcome.plan.before.peak_bytes,
            "{model}"
        );
    }
}

#[test]
fn a_frozen_layer_is_untouched() {
    for policy in [
        Policy::FULL,
        Policy::SELECTIVE,
        Policy::SUBMODULE,
        Policy::group(2),
    ] {
        let mut request = request(policy, PolicyOverrides::default());
        request.selection.freeze = vec![
            "transformer.h.0.*".into(),
            "*wpe*".into(),
            "lm_head*".into(),
        ];
        let (graph, made) = planned("gpt2", &request).unwrap();
        let blocks = &made.bound.layers;
        let mut again = [0, 0];
        for node in copies(&graph) {
            if let Some(block) = node.recompute_of.and_then(|n| blocks.of[graph.original(n)]) {
                again[block] += 1;
            }
        }
        assert_eq!(again[0], 0, "{policy}");
        assert!(again[1] > 0, "{policy}");
        // An op rule does not reach into it either, a path does.
        let op = overrides(&[(Constraint::Recompute, Target::op("Gemm").unwrap())]);
        request.overrides = op;
        let (graph, _) = planned("gpt2", &request).unwrap();
        let first = copies(&graph)
            .into_iter()
            .filter(|n| paths_of(n).contains(&"transformer.h.0"));
        assert_eq!(first.count(), 0);
    }
}

/// Nothing of the frozen part runs twice, and of what it makes the backward reads only what the rest of the forward reads,
/// too: no activation of it is kept for a gradient.
fn assert_untouched(graph: &Graph, frozen: &dyn Fn(NodeId) -> bool, what: &str) {
    let mut crossing = 0;
    for id in graph.order() {
        let node = graph.node(*id);
        if node.role != Role::Forward {
            continue;
        }
        if node.recompute_of.is_some() {
            assert!(!frozen(graph.original(*id)), "{what}: {}", node.name);
            continue;
        }
        if !frozen(*id) {
            continue;
        }
        for value in &node.outs {
            let readers: Vec<NodeId> = graph.value(*value).uses().iter().map(|u| u.node).collect();
            let late = |n: &NodeId| {
                let reader = graph.node(*n);
                reader.role == Role::Backward || reader.recompute_of.is_some()
            };
            let goes_on = |n: &NodeId| !late(n) && !frozen(*n);
            let crosses = readers.iter().any(goes_on);
            crossing += usize::from(crosses);
            assert!(
                crosses || !readers.iter().any(late),
                "{what}: `{}` is kept for a gradient",
                graph.value(*value).name
            );
        }
    }
    assert!(crossing > 0, "{what}: nothing of the frozen part is read");
}

#[test]
fn the_first_half_of_a_model_frozen() {
    let patterns = [
        "model.layers.0.*",
        "model.layers.1.*",
        "*embed*",
        "lm_head*",
        "*altup_projections*",
        "*per_layer_model*",
        "*per_layer_projection_norm*",
    ];
    for policy in [Policy::NONE, Policy::FULL, Policy::SELECTIVE] {
        let mut request = request(policy, PolicyOverrides::default());
        let all = planned("gemma3n", &request).unwrap().1;
        request.selection.freeze = patterns.map(String::from).to_vec();
        let (graph, made) = planned("gemma3n", &request).unwrap();
        // Modules, for a layer of the plan may begin with the first ops of the next module.
        let frozen = |n: NodeId| {
            let paths = paths_of(graph.node(n));
            paths.contains(&"model.layers.0") || paths.contains(&"model.layers.1")
        };
        assert_untouched(&graph, &frozen, &policy.to_string());
        let gradients = graph.outputs().iter().map(|v| &graph.value(*v).name);
        let gradients: Vec<&String> = gradients.filter(|n| n.ends_with(".grad")).collect();
        assert!(gradients.len() > 20, "{policy}");
        assert!(gradients.iter().all(|n| !n.contains("layers.0.")));
        assert!(made.outcome.plan.before.peak_bytes < all.outcome.plan.before.peak_bytes);
        assert!(made.outcome.plan.recompute_flops() <= all.outcome.plan.recompute_flops());
    }
}

/// A tower of an image model in front of a projection into a language model.
const TOWER: &str = "graph @g typed (%pixels: f32[b, 3, 8, 8], %ids: i64[b, s]) -> (%y) {
  init %patch : f32[4, 3, 4, 4] = file \"w\" offset 0 length 768
  init %tower1 : f32[4, 16] = file \"w\" offset 0 length 256
  init %tower2 : f32[16, 4] = file \"w\" offset 0 length 256
  init %project : f32[4, 8] = file \"w\" offset 0 length 128
  init %table : f32[9, 8] = file \"w\" offset 0 length 288
  init %up : f32[8, 32] = file \"w\" offset 0 length 1024
  init %down : f32[32, 8] = file \"w\" offset 0 length 1024
  init %flat : i64[3] = [0, 0, -1]
  %seen = Conv %pixels, %patch {strides=[4, 4]} : f32[b, 4, 2, 2]
  %rows = Reshape %seen, %flat : f32[b, 4, 4]
  %tokens = Transpose %rows {perm=[0, 2, 1]} : f32[b, 4, 4]
  %wide = MatMul %tokens, %tower1 : f32[b, 4, 16]
  %bent = Tanh %wide : f32[b, 4, 16]
  %image = MatMul %bent, %tower2 : f32[b, 4, 4]
  %prefix = MatMul %image, %project : f32[b, 4, 8]
  %words = Gather %table, %ids {axis=0} : f32[b, s, 8]
  %text = Concat %prefix, %words {axis=1} : f32[b, s + 4, 8]
  %h = MatMul %text, %up : f32[b, s + 4, 32]
  %a = Tanh %h : f32[b, s + 4, 32]
  %y = MatMul %a, %down : f32[b, s + 4, 8]
}
";

#[test]
fn a_frozen_tower_is_left_alone() {
    for policy in [Policy::NONE, Policy::SELECTIVE] {
        let mut graph = ckpt_passes::text::parse(TOWER).unwrap();
        let mut request = request(policy, PolicyOverrides::default());
        request.dims = vec![("b".into(), 8), ("s".into(), 64)];
        request.selection.freeze = vec!["patch".into(), "tower*".into()];
        let again = overrides(&[(Constraint::Recompute, Target::op("Tanh").unwrap())]);
        request.overrides = again;
        compile(&mut graph, &request, &mut Watch::default()).unwrap();
        let tower: Vec<NodeId> = ["seen", "rows", "tokens", "wide", "bent", "image"]
            .iter()
            .map(|v| graph.def_node(graph.find_value(v).unwrap()).unwrap())
            .collect();
        assert_untouched(&graph, &|n| tower.contains(&n), &policy.to_string());
        assert!(!copies(&graph).is_empty(), "the language model is planned");
        let names = graph
            .outputs()
            .iter()
            .map(|v| graph.value(*v).name.as_str());
        let gradients: Vec<&str> = names.filter(|n| n.ends_with(".grad")).collect();
        assert_eq!(
            gradients,
            ["project.grad", "table.grad", "up.grad", "down.grad"]
        );
    }
}
