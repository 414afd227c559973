//! Shared by tests: a small random number generator, calls of every op ([`recipes`]), random typed graphs over all rows
//! ([`models`]), and random training graphs over vectors for the planner.
//!
//! Compiled for this crate's tests and under the feature `testing` only.

mod mixture;
pub mod models;
pub mod recipes;
pub mod updates;

pub use ckpt_plan::testing::{self as dags, Random};
pub use mixture::mixture_of_experts;

use crate::ir::op::{
    BatchAxes, Body, Domain, Effect, Footprint, Grad, OpClass, OpDef, Place, Slot, free,
};
use crate::ir::{Attrs, DType, Graph, Role, Ty, ValueId};
use crate::ops::rule::{SMALL_X, SMALL_Y, standard};
use crate::ops::{Builder, EmitExt};

/// A view of its operand that takes a few bytes of temporaries.
pub static LOOK: OpDef = OpDef {
    ins: SMALL_X,
    outs: SMALL_Y,
    cost: free,
    memory: |cx| {
        let strides = cx.operand(0).map_or(vec![], |x| x.strides.clone());
        Footprint::new(vec![Place::View { of: 0, strides }]).with_temp(3)
    },
    ..test_op("Look")
};

/// Like an addition, but stateful: it is never recomputed.
pub static ONCE: OpDef = OpDef {
    ins: &[Slot::req("a"), Slot::req("b")],
    outs: SMALL_Y,
    effect: Effect::Stateful,
    cost: |cx| cx.elementwise(3),
    ..test_op("Once")
};

const fn test_op(name: &'static str) -> OpDef {
    OpDef {
        body: Body::None("a test op"),
        grad: Grad::Zero("a test op"),
        ..standard(name, Domain::Ckpt, OpClass::Other, BatchAxes::Mixed)
    }
}

/// Returns a graph of `forward` forward ops over vectors of four sizes, and backward ops that read these roughly in
/// reverse.
pub fn random_graph(r: &mut Random, forward: usize) -> Graph {
    let mut g = Graph::new("random");
    let mut values: Vec<Vec<ValueId>> = (0..4)
        .map(|i| {
            vec![g.add_input(
                &format!("x{i}"),
                Some(Ty::new(DType::F32, [(1i64 << i).into()])),
            )]
        })
        .collect();
    let mut b = Builder::new(&mut g);
    let mut made: Vec<Vec<ValueId>> = vec![Vec::new(); 4];
    for _ in 0..forward {
        let class = r.below(4);
        let v = any_op(r, &mut b, &values[class].clone());
        values[class].push(v);
        made[class].push(v);
    }
    b.role = Role::Backward;
    let mut outputs = Vec::new();
    for class in 0..4 {
        let mut grads = vec![values[class][0]];
        for v in made[class].iter().rev() {
            let other = if r.below(3) == 0 {
                values[class][r.below(values[class].len())]
            } else {
                *v
            };
            let last = grads[grads.len() - 1];
            let other = if r.below(3) == 0 {
                b.emit(&LOOK, &[other], Attrs::new()).unwrap()
            } else {
                other
            };
            let g = b.mul(last, other).unwrap();
            grads.push(if r.below(4) == 0 {
                b.emit(&LOOK, &[g], Attrs::new()).unwrap()
            } else {
                g
            });
        }
        outputs.push(grads[grads.len() - 1]);
        if !made[class].is_empty() && r.below(2) == 0 {
            outputs.push(made[class][made[class].len() - 1]);
        }
    }
    g.set_outputs(outputs);
    g
}

fn any_op(r: &mut Random, b: &mut Builder, from: &[ValueId]) -> ValueId {
    let mut pick = || from[from.len() - 1 - r.below(from.len().min(4))];
    let (x, y) = (pick(), pick());
    match r.below(6) {
        0 => b.neg(x).unwrap(),
        1 | 2 => b.emit(&LOOK, &[x], Attrs::new()).unwrap(),
        3 => b.emit(&ONCE, &[x, y], Attrs::new()).unwrap(),
        _ => b.add(x, y).unwrap(),
    }
}

/// What a layer of [`transformer`] is like.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Residual around norm and branch (GPT-2, Llama).
    PreNorm,
    /// Norm after the residual (BERT).
    PostNorm,
}

/// Layers of attention and a gated MLP over `x: f32[b, s, 8]`, two heads of four, then a norm and a head. A mask `m:
/// f32[s, s]` is added to the scores of every layer. Products of a layer run in the order q, k, v, o, gate, up, down.
pub fn transformer(layers: usize, style: Style) -> Graph {
    let mut g = Graph::new("transformer");
    let sym = crate::ir::Dim::symbol;
    let x = g.add_input(
        "x",
        Some(Ty::new(DType::F32, [sym("b"), sym("s"), 8.into()])),
    );
    let m = g.add_input("m", Some(Ty::new(DType::F32, [sym("s"), sym("s")])));
    let mut net = Net {
        b: Builder::new(&mut g),
        weights: 0,
    };
    let mask = net.b.neg(m).unwrap();
    let start = net.product(x, 8, 8);
    let mut stream = if style == Style::PostNorm {
        net.norm(start)
    } else {
        start
    };
    for _ in 0..layers {
        for attends in [true, false] {
            let input = if style == Style::PreNorm {
                net.norm(stream)
            } else {
                stream
            };
            let out = if attends {
                net.attention(input, mask)
            } else {
                net.mlp(input)
            };
            let sum = net.b.add(stream, out).unwrap();
            stream = if style == Style::PostNorm {
                net.norm(sum)
            } else {
                sum
            };
        }
    }
    let last = net.norm(stream);
    let logits = net.product(last, 8, 16);
    g.rename_value(logits, "logits");
    g.set_outputs(vec![logits]);
    g
}

/// What a layer of [`sharing`] takes from an earlier one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takes {
    /// Reads that layer's keys and values, and makes none.
    pub keys_values: Option<usize>,
    /// Reads that layer's weights.
    pub weights: Option<usize>,
}

/// A decoder-like stack (pre-norm) in which layers share keys and values, or weights. `per_reader` repeats the layout
/// of shared keys for each reader, as some exporters do.
pub fn sharing(layers: &[Takes], per_reader: bool) -> Graph {
    let mut g = Graph::new("sharing");
    let sym = crate::ir::Dim::symbol;
    let x = g.add_input(
        "x",
        Some(Ty::new(DType::F32, [sym("b"), sym("s"), 8.into()])),
    );
    let m = g.add_input("m", Some(Ty::new(DType::F32, [sym("s"), sym("s")])));
    let mut net = Net {
        b: Builder::new(&mut g),
        weights: 0,
    };
    let mut stream = net.product(x, 8, 8);
    let mut made: Vec<[ValueId; 2]> = Vec::new();
    let mut heads: Vec<[ValueId; 2]> = Vec::new();
    let first = net.weights;
    let mut next = first;
    for takes in layers {
        net.weights = takes.weights.map_or(next, |of| first + 9 * of);
        let input = net.norm(stream);
        let q = net.product(input, 8, 8);
        let q = net.heads(q, [0, 2, 1, 3]);
        let own = match takes.keys_values {
            Some(of) => made[of],
            None => [net.product(input, 8, 8), net.product(input, 8, 8)],
        };
        let [k, v] = match takes.keys_values {
            Some(of) if !per_reader => heads[of],
            _ => [
                net.heads(own[0], [0, 2, 3, 1]),
                net.heads(own[1], [0, 2, 1, 3]),
            ],
        };
        made.push(own);
        heads.push([k, v]);
        let out = net.attend([q, k, v], m);
        stream = net.b.add(stream, out).unwrap();
        let input = net.norm(stream);
        let out = net.mlp(input);
        stream = net.b.add(stream, out).unwrap();
        next = next.max(net.weights);
    }
    let logits = net.product(stream, 8, 16);
    g.rename_value(logits, "logits");
    g.set_outputs(vec![logits]);
    g
}

struct Net<'g> {
    b: Builder<'g>,
    weights: usize,
}

impl Net<'_> {
    fn op(&mut self, op: &'static OpDef, ins: &[ValueId], attrs: Attrs) -> ValueId {
        self.b.emit(op, ins, attrs).unwrap()
    }

    fn weight(&mut self, dims: &[u64]) -> ValueId {
        self.weights += 1;
        if let Some(known) = self.b.graph.find_value(&format!("w{}", self.weights)) {
            return known;
        }
        let n: u64 = dims.iter().product();
        let bytes: Vec<u8> = (0..n)
            .flat_map(|i| (0.01 * (i % 7) as f32).to_le_bytes())
            .collect();
        let tensor = crate::ir::Tensor::new(DType::F32, dims.to_vec(), bytes);
        self.b.graph.add_init(&format!("w{}", self.weights), tensor)
    }

    fn product(&mut self, x: ValueId, from: u64, to: u64) -> ValueId {
        let w = self.weight(&[from, to]);
        self.op(&crate::ops::matmul::MATMUL, &[x, w], Attrs::new())
    }

    fn norm(&mut self, x: ValueId) -> ValueId {
        let scale = self.weight(&[8]);
        self.op(&crate::ops::norm::RMS_NORM, &[x, scale], Attrs::new())
    }

    fn heads(&mut self, x: ValueId, perm: [i64; 4]) -> ValueId {
        let shape = self.b.ints(&[0, 0, 2, 4]);
        let split = self.op(&crate::ops::shape::RESHAPE, &[x, shape], Attrs::new());
        self.op(
            &crate::ops::shape::TRANSPOSE,
            &[split],
            Attrs::new().with("perm", perm.to_vec()),
        )
    }

    fn attention(&mut self, x: ValueId, mask: ValueId) -> ValueId {
        let (q, k, v) = (
            self.product(x, 8, 8),
            self.product(x, 8, 8),
            self.product(x, 8, 8),
        );
        let (q, k, v) = (
            self.heads(q, [0, 2, 1, 3]),
            self.heads(k, [0, 2, 3, 1]),
            self.heads(v, [0, 2, 1, 3]),
        );
        self.attend([q, k, v], mask)
    }

    fn attend(&mut self, [q, k, v]: [ValueId; 3], mask: ValueId) -> ValueId {
        let matmul = &crate::ops::matmul::MATMUL;
        let scores = self.op(matmul, &[q, k], Attrs::new());
        let masked = self.b.add(scores, mask).unwrap();
        let p = self.op(
            &crate::ops::softmax::SOFTMAX,
            &[masked],
            Attrs::new().with("axis", -1),
        );
        let o = self.op(matmul, &[p, v], Attrs::new());
        let perm = Attrs::new().with("perm", vec![0, 2, 1, 3]);
        let o = self.op(&crate::ops::shape::TRANSPOSE, &[o], perm);
        let shape = self.b.ints(&[0, 0, 8]);
        let o = self.op(&crate::ops::shape::RESHAPE, &[o, shape], Attrs::new());
        self.product(o, 8, 8)
    }

    fn mlp(&mut self, x: ValueId) -> ValueId {
        let (gate, up) = (self.product(x, 8, 12), self.product(x, 8, 12));
        let gate = self.op(&crate::ops::activation::SIGMOID, &[gate], Attrs::new());
        let h = self.b.mul(gate, up).unwrap();
        self.product(h, 12, 8)
    }
}
