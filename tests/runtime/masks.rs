//! Attentions whose masks are low but finite numbers, put in one op or left as they are: the same results and gradients,
//! also of queries that see no key.
//!
//! Minus infinity hides a key for good. A low number is a weight like any other where a whole row is as low: then all
//! weights are equal, and whether a gradient reaches the scores depends on how the number came there.

use crate::support::torch;

use ckpt_opt::runtime::executor::Program;
use ckpt_passes::ir::{DType, Graph, Tensor as Constant};
use ckpt_passes::text;
use ckpt_passes::transform::autodiff::autodiff;
use ckpt_passes::transform::fuse::fuse;
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::loss::{Loss, add_loss};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

const QUERIES: i64 = 5;
const MIN: &str = "-3.4028235e38";

/// An attention of four query heads on two key heads, masked by `lines`, which make `%masked` of `%scores`. `%pad` says
/// which keys count, `%seen` which are not behind the query; `%added` is 0 or the lowest number by `%pad`.
fn attention(lines: &str) -> Graph {
    let source = format!(
        "graph @g imported (%x: f32[2, 5, 8], %pad: bool[2, 1, 1, 5]) -> (%y) {{
  init %wq : f32[8, 16] = splat 0.1
  init %wk : f32[8, 16] = splat 0.1
  init %wv : f32[8, 16] = splat 0.1
  init %rel : f32[4, 5, 5] = splat 0.1
  init %heads : i64[4] = [2, 5, 4, 4]
  init %zero : i64[] = 0
  init %one : i64[] = 1
  init %five : i64[] = 5
  init %a0 : i64[1] = [0]
  init %a1 : i64[1] = [1]
  init %none : f32[] = 0.0
  init %min : f32[] = {MIN}
  init %less : f32[] = -1e32
  init %endless : f32[] = -inf
  init %scale : f32[] = 0.5
  %q0 = MatMul %x, %wq
  %q1 = Reshape %q0, %heads
  %q = Transpose %q1 {{perm=[0, 2, 1, 3]}}
  %k0 = MatMul %x, %wk
  %k1 = Reshape %k0, %heads
  %k = Transpose %k1 {{perm=[0, 2, 3, 1]}}
  %v0 = MatMul %x, %wv
  %v1 = Reshape %v0, %heads
  %v = Transpose %v1 {{perm=[0, 2, 1, 3]}}
  %at = Range %zero, %five, %one
  %row = Unsqueeze %at, %a1
  %column = Unsqueeze %at, %a0
  %seen = LessOrEqual %column, %row
  %added = Where %pad, %none, %min
  %band = Where %seen, %none, %min
  %qk = MatMul %q, %k
  %scores = Mul %qk, %scale
{lines}
  %p = Softmax %masked
  %y = MatMul %p, %v
}}
"
    );
    text::parse(&source).unwrap_or_else(|e| panic!("{e}\n{source}"))
}

/// Results and gradients of a graph, and whether the attention is one op.
fn run(
    mut graph: Graph,
    is_fused: bool,
    inputs: &BTreeMap<String, Tensor>,
) -> (bool, Vec<(String, Tensor)>) {
    infer(&mut graph).unwrap();
    if is_fused {
        fuse(&mut graph).unwrap();
    }
    let is_one = graph
        .order()
        .iter()
        .any(|id| graph.node(*id).op.name == "Attention");
    let seeds = add_loss(&mut graph, &Loss::parse("vjp").unwrap()).unwrap();
    let weights = ["wq", "wk", "wv", "rel"];
    let weights = weights.map(|name| graph.find_value(name).unwrap());
    autodiff(&mut graph, &seeds.seeds, &weights).unwrap();
    let mut program = Program::new(&graph).unwrap();
    for (n, id) in weights.into_iter().enumerate() {
        let dims = graph.ty(id).static_dims().unwrap();
        tch::manual_seed(n as i64);
        let weight = Tensor::randn(dims, (Kind::Float, Device::Cpu)) * 0.5;
        let bytes = ckpt_torch::bytes::read(&weight).unwrap();
        let dims: Vec<u64> = weight.size().iter().map(|d| *d as u64).collect();
        let weight = Constant::new(DType::F32, dims, bytes);
        program.override_weight(id, &weight).unwrap();
    }
    (is_one, program.run(inputs).unwrap().outputs)
}

/// Which keys of each of two sequences count.
fn feeds(pad: [[bool; QUERIES as usize]; 2]) -> BTreeMap<String, Tensor> {
    tch::manual_seed(7);
    let options = (Kind::Float, Device::Cpu);
    let pad = Tensor::from_slice(&pad.concat()).reshape([2, 1, 1, QUERIES]);
    BTreeMap::from([
        ("x".to_string(), Tensor::randn([2, QUERIES, 8], options)),
        (
            "y.cotangent".to_string(),
            Tensor::randn([2, 4, QUERIES, 4], options),
        ),
        ("pad".to_string(), pad),
    ])
}

/// One op or not, results and gradients are those of the parts, whatever is padded.
fn holds(lines: &str, one_op: bool) {
    // Weights are drawn by a generator that all threads share.
    torch::alone();
    let all = [true; 5];
    let (left, right) = (
        [false, false, true, true, true],
        [true, true, true, false, false],
    );
    for pad in [[all, right], [left, all], [[false; 5], left]] {
        let inputs = feeds(pad);
        let (is_one, found) = run(attention(lines), true, &inputs);
        assert_eq!(is_one, one_op, "{lines}");
        let (_, expected) = run(attention(lines), false, &inputs);
        for ((name, a), (_, b)) in found.iter().zip(&expected) {
            let most = b.abs().max().double_value(&[]).max(1.0);
            let gap = (a - b).abs().max().double_value(&[]);
            assert!(
                gap <= 2e-6 * most,
                "{name} differs by {gap}, {pad:?}:\n{lines}"
            );
        }
    }
}

#[test]
fn a_low_number_in_place_of_scores() {
    holds("  %masked = Where %pad, %scores, %min", true);
    holds("  %masked = Where %seen, %scores, %min", true);
    let both = "  %both = And %seen, %pad\n  %masked = Where %both, %scores, %min";
    holds(both, true);
    let two = "  %m = Where %seen, %scores, %min\n  %masked = Where %pad, %m, %min";
    holds(two, true);
    let biased = "  %m = Add %scores, %rel\n  %masked = Where %pad, %m, %min";
    holds(biased, true);
}

#[test]
fn a_low_number_added_to_scores() {
    holds("  %masked = Add %scores, %added", true);
    holds("  %masked = Add %scores, %band", true);
    holds(
        "  %m = Add %band, %added\n  %masked = Add %scores, %m",
        true,
    );
    holds(
        "  %m = Add %scores, %band\n  %masked = Add %m, %added",
        true,
    );
    holds("  %m = Add %scores, %rel\n  %masked = Add %m, %band", true);
}

#[test]
fn rows_without_a_key_that_no_one_op_weighs_so() {
    // A padded key and one behind the query compete where a row has no other, and only one of them has a gradient.
    holds(
        "  %m = Where %seen, %scores, %min\n  %masked = Add %m, %added",
        false,
    );
    holds(
        "  %m = Add %scores, %added\n  %masked = Where %seen, %m, %min",
        false,
    );
    holds(
        "  %m = Where %seen, %scores, %less\n  %masked = Where %pad, %m, %min",
        false,
    );
    holds(
        "  %m = Where %pad, %scores, %min\n  %masked = Add %m, %rel",
        false,
    );
}
