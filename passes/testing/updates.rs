//! Random training steps with updates of parameters and states at random places, some before readers of the old values.

use super::Random;
use crate::ir::{Attrs, DType, Graph, NodeId, Phase, Role, Tensor, Ty, ValueId};
use crate::ops::activation::TANH;
use crate::ops::arith::{ADD, MUL, NEG};
use crate::ops::matmul::MATMUL;
use crate::ops::optimizer::{
    ADAM_MEAN, ADAM_SQUARE, ADAMW, MOMENTUM, MOMENTUM_FACTOR, SGD, WEIGHT_DECAY,
};
use crate::ops::shape::TRANSPOSE;
use crate::ops::{Builder, EmitExt};

/// Rows and columns of every matrix.
const SIZE: i64 = 3;

/// Four parameters `w0` … (initializers), of which two have a state `b0`, `b1` (inputs) and a third one two, an input `x`,
/// a learning rate `lr` and a `step`; `ops` ops over matrices, half of them backward. Every parameter is updated once. Outputs are what updates make, the
/// last result, and perhaps a view of a parameter.
pub fn random_updates(r: &mut Random, ops: usize) -> Graph {
    let mut g = Graph::new("updates");
    let matrix = || Some(Ty::new(DType::F32, [SIZE.into(), SIZE.into()]));
    let x = g.add_input("x", matrix());
    let lr = g.add_input("lr", Some(Ty::new(DType::F32, [])));
    let step = g.add_input("step", Some(Ty::new(DType::I64, [])));
    let moments = [g.add_input("m2", matrix()), g.add_input("v2", matrix())];
    let states = [g.add_input("b0", matrix()), g.add_input("b1", matrix())];
    let mut weight = |i: usize| {
        let n = SIZE as u64;
        let element = |k: u64| ((k * 7 + i as u64 * 5) % 11) as f32 * 0.125 - 0.5;
        let bytes = (0..n * n).flat_map(|k| element(k).to_le_bytes());
        let bytes: Vec<u8> = bytes.collect();
        g.add_init(&format!("w{i}"), Tensor::new(DType::F32, vec![n, n], bytes))
    };
    let weights: Vec<ValueId> = (0..4).map(&mut weight).collect();
    let mut b = Builder::new(&mut g);
    let mut values: Vec<ValueId> = weights.iter().copied().chain([x]).collect();
    for i in 0..ops {
        if i == ops / 2 {
            b.role = Role::Backward;
        }
        let v = any_op(r, &mut b, &values);
        values.push(v);
    }
    b.role = Role::Backward;
    let mut outputs = vec![values[values.len() - 1]];
    if r.below(3) == 0 {
        outputs.push(b.emit(&TRANSPOSE, &[weights[0]], Attrs::new()).unwrap());
    }
    let first = b.graph.order().len();
    for (i, w) in weights.iter().enumerate() {
        // Any result of the backward part.
        let made = values.len() - 5 - ops / 2;
        let gradient = values[5 + ops / 2 + r.below(made)];
        let mut from = gradient;
        if let Some(state) = states.get(i) {
            let ins = match r.below(2) {
                0 => vec![Some(*state), Some(gradient)],
                _ => vec![Some(*state), Some(gradient), Some(*w)],
            };
            let attrs = Attrs::new()
                .with(MOMENTUM_FACTOR, 0.5f32)
                .with(WEIGHT_DECAY, 0.25f32);
            from = b.emit_n(&MOMENTUM, ins, attrs, 1).unwrap()[0];
            outputs.push(from);
        }
        if i == 2 {
            let [mean, square] = [(&ADAM_MEAN, moments[0]), (&ADAM_SQUARE, moments[1])]
                .map(|(op, state)| b.emit(op, &[state, gradient], Attrs::new()).unwrap());
            let ins = [*w, mean, square, lr, step];
            let updated = b.emit(&ADAMW, &ins, Attrs::new()).unwrap();
            outputs.extend([mean, square, updated]);
            continue;
        }
        let updated = b.emit(&SGD, &[*w, from, lr], Attrs::new()).unwrap();
        outputs.push(updated);
    }
    g.set_outputs(outputs);
    spread(&mut g, r, first);
    g.phase = Phase::Training;
    g
}

fn any_op(r: &mut Random, b: &mut Builder, from: &[ValueId]) -> ValueId {
    let mut pick = || match r.below(3) {
        0 => from[r.below(5)],
        _ => from[from.len() - 1 - r.below(from.len().min(6))],
    };
    let (x, y) = (pick(), pick());
    let no = Attrs::new;
    match r.below(7) {
        0 => b.emit(&NEG, &[x], no()).unwrap(),
        1 => b.emit(&TANH, &[x], no()).unwrap(),
        2 | 3 => b.emit(&TRANSPOSE, &[x], no()).unwrap(),
        4 => b.emit(&MATMUL, &[x, y], no()).unwrap(),
        5 => b.emit(&MUL, &[x, y], no()).unwrap(),
        _ => b.emit(&ADD, &[x, y], no()).unwrap(),
    }
}

/// Moves the nodes from `first` on to random places behind what they read.
fn spread(g: &mut Graph, r: &mut Random, first: usize) {
    let mut order: Vec<NodeId> = g.order()[..first].to_vec();
    for id in g.order()[first..].iter().copied() {
        let operands = g.node(id).ins.iter().flatten();
        let makers: Vec<NodeId> = operands.filter_map(|v| g.def_node(*v)).collect();
        let is_maker = |id: &NodeId| makers.contains(id);
        let least = order.iter().rposition(is_maker).map_or(0, |at| at + 1);
        order.insert(least + r.below(order.len() - least + 1), id);
    }
    g.set_order(order);
}
