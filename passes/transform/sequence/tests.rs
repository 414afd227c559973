//! Which models are cut along their sequence, and what the graph is then.

use super::*;
use crate::compile::{Request, compile};
use crate::driver::Watch;
use crate::ir::Phase;
use crate::ops::concat::CONCAT;
use crate::ops::random::DROPOUT;
use crate::plan::{Plan, Policy};
use crate::text;
use crate::transform::loss::Loss;
use std::collections::BTreeSet;

/// Layers of attention on 12 tokens, with a causal mask and further attributes.
fn model(layers: usize, attributes: &str) -> Graph {
    let layer = |i: usize| {
        format!(
            "  %k{i} = MatMul %x{i}, %w
  %a{i} = Attention %x{i}, %k{i}, %k{i} {{causal=1{attributes}}}
  %x{next} = Add %x{i}, %a{i}
",
            next = i + 1
        )
    };
    let all: String = (0..layers).map(layer).collect();
    text::parse(&format!(
        "graph @g imported (%ids: i64[12], %labels: i64[12]) -> (%loss) {{
  init %table : f32[5, 4] = splat 0.5
  init %w : f32[4, 4] = splat 0.5
  init %head : f32[4, 5] = splat 0.25
  %x0 = Gather %table, %ids
{all}  %z = MatMul %x{layers}, %head
  %loss = SoftmaxCrossEntropyLoss %z, %labels {{reduction=\"mean\"}}
}}
"
    ))
    .unwrap()
}

fn chunked(mut graph: Graph, count: usize) -> Graph {
    let request = Request {
        loss: Loss::Output("loss".into()),
        plan: Policy::NONE.into(),
        sequence_chunks: count,
        ..Request::default()
    };
    compile(&mut graph, &request, &mut Watch::default()).unwrap();
    assert!(graph.phase > Phase::Typed);
    graph
}

/// Returns the operand counts of the concatenations of a forward pass, in order.
fn prefixes(graph: &Graph) -> Vec<usize> {
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let joins = nodes.filter(|n| n.op == &CONCAT && n.is_forward());
    joins.map(|n| n.ins.len()).collect()
}

#[test]
fn each_prefix_is_made_of_the_pieces() {
    // Keys and values are one value, so each layer has one prefix a chunk.
    assert_eq!(prefixes(&chunked(model(1, ""), 4)), [2, 3, 4]);
    assert_eq!(prefixes(&chunked(model(2, ""), 3)), [2, 2, 3, 3]);
}

#[test]
fn nodes_grow_with_chunks_and_layers_alike() {
    let nodes = |layers: usize, count: usize| chunked(model(layers, ""), count).order().len();
    let per_chunk = (nodes(1, 6) - nodes(1, 4)) / 2;
    assert_eq!(nodes(1, 12) - nodes(1, 6), 6 * per_chunk);
    let per_layer = nodes(2, 12) - nodes(1, 12);
    assert_eq!(nodes(3, 12) - nodes(2, 12), per_layer);
}

#[test]
fn a_window_reads_the_chunks_that_it_reaches() {
    // Chunks of 3 positions: a query sees at most 2 positions before it, so at most one chunk.
    assert_eq!(
        prefixes(&chunked(model(1, ", window_left=2"), 4)),
        [2, 2, 2]
    );
    // From the first position of a chunk, 4 positions before it lie in two chunks.
    assert_eq!(
        prefixes(&chunked(model(1, ", window_left=4"), 4)),
        [2, 3, 3]
    );
}

#[test]
fn each_chunk_draws_by_a_stream_of_its_own() {
    let text = "graph @g imported (%ids: i64[12], %labels: i64[12], %rng_seed: i64[]) -> (%loss) {
  init %table : f32[5, 4] = splat 0.5
  init %head : f32[4, 5] = splat 0.25
  init %ratio : f32[] = 0.5
  init %stream : i64[] = 1
  %x = Gather %table, %ids
  %d = Dropout %x, %ratio, %rng_seed, %stream
  %a = Attention %d, %d, %d {causal=1}
  %z = MatMul %a, %head
  %loss = SoftmaxCrossEntropyLoss %z, %labels {reduction=\"mean\"}
}
";
    let graph = chunked(text::parse(text).unwrap(), 4);
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let drawn: Vec<_> = nodes.filter(|n| n.op == &DROPOUT).collect();
    let streams = |is_forward: bool| {
        let some = drawn.iter().filter(|n| n.is_forward() == is_forward);
        some.map(|n| n.operand(3).unwrap()).collect::<BTreeSet<_>>()
    };
    // A gradient draws what its forward pass drew.
    assert_eq!((drawn.len(), streams(true).len()), (8, 4));
    assert_eq!(streams(true), streams(false));
}

/// Returns the policy's plan of a model in chunks.
fn planned(count: usize, policy: &str) -> Plan {
    let request = Request {
        loss: Loss::Output("loss".into()),
        plan: Policy::parse(policy).unwrap().into(),
        sequence_chunks: count,
        ..Request::default()
    };
    let done = compile(&mut model(3, ""), &request, &mut Watch::default()).unwrap();
    done.planned.unwrap().outcome.plan
}

#[test]
fn a_policy_keeps_what_later_chunks_read() {
    let (all, chunks) = (planned(4, "none"), planned(4, "chunks"));
    assert!(chunks.after.peak_bytes < all.after.peak_bytes);
    let kept = chunks
        .decisions
        .iter()
        .filter(|d| d.reason == "later chunks read it");
    // Keys, which are values too, of three layers and of all chunks but the last.
    assert_eq!(kept.count(), 9);
    let graph = || model(3, "");
    let request = Request {
        loss: Loss::Output("loss".into()),
        plan: Policy::parse("chunks").unwrap().into(),
        ..Request::default()
    };
    let error = compile(&mut graph(), &request, &mut Watch::default());
    assert!(error.err().unwrap().to_string().contains("--tile-sequence"));
}

#[test]
fn sequences_shorter_than_chunks_are_refused() {
    let request = |count: usize| Request {
        loss: Loss::Output("loss".into()),
        plan: Policy::NONE.into(),
        sequence_chunks: count,
        ..Request::default()
    };
    let mut graph = model(1, "");
    let error = compile(&mut graph, &request(13), &mut Watch::default());
    let error = error.err().unwrap();
    assert_eq!((error.code(), error.exit_code()), ("tile", 2));
}

#[test]
fn attentions_that_are_not_recognised_are_refused_with_the_reason() {
    let step = |scores: &str| {
        let text = format!(
            "graph @g imported (%ids: i64[12], %labels: i64[12]) -> (%loss) {{
  init %table : f32[5, 16] = splat 0.5
  init %w : f32[16, 16] = splat 0.5
  init %head : f32[16, 5] = splat 0.25
  init %others : f32[12, 2] = splat 0.5
  init %from : i64[1] = [0]
  init %to : i64[1] = [12]
  init %last : i64[1] = [1]
  %x = Gather %table, %ids
  %k = MatMul %x, %w
  %t = Transpose %k {{perm=[1, 0]}}
  %scores = MatMul %x, %t
  {scores}
  %a = MatMul %p, %k
  %z = MatMul %a, %head
  %loss = SoftmaxCrossEntropyLoss %z, %labels {{reduction=\"mean\"}}
}}
"
        );
        let request = Request {
            loss: Loss::Output("loss".into()),
            plan: Policy::NONE.into(),
            sequence_chunks: 2,
            ..Request::default()
        };
        let done = compile(
            &mut text::parse(&text).unwrap(),
            &request,
            &mut Watch::default(),
        );
        done.err().unwrap().to_string()
    };
    let joined = step(
        "%all = Concat %scores, %others {axis=1}
  %q = Softmax %all {axis=1}
  %p = Slice %q, %from, %to, %last",
    );
    assert!(joined.contains("joins them with others"), "{joined}");
    assert!(joined.contains("scores"), "{joined}");
    let other = step("%square = Mul %scores, %scores\n  %p = Softmax %square {axis=1}");
    assert!(other.contains("not recognised as one"), "{other}");
}
