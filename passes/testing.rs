//! What several unit tests share: a small random number generator, and random training-like graphs.

use crate::ir::op::{Body, Domain, Effect, Footprint, Grad, OpDef, Place, Slot, free, no_fold};
use crate::ir::{Attrs, Builder, DType, Graph, Role, Ty, ValueId};

/// Xorshift; the seed must not be 0.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// A view of its operand that takes a few bytes of temporaries.
pub static LOOK: OpDef = OpDef {
    name: "Look",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("x")],
    outs: &[Slot::req("y")],
    effect: Effect::Pure,
    infer: |cx| Ok(vec![cx.ty(0)?.clone()]),
    fold: no_fold,
    grad: Grad::Zero("a test op"),
    cost: free,
    memory: |cx| Footprint {
        outs: vec![Place::View {
            of: 0,
            strides: cx.ins[0].as_ref().map_or(vec![], |x| x.strides.clone()),
        }],
        temp_bytes: 3,
    },
    body: Body::None("a test op"),
};

/// Like an addition, but never run twice.
pub static ONCE: OpDef = OpDef {
    name: "Once",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("a"), Slot::req("b")],
    outs: &[Slot::req("y")],
    effect: Effect::Stateful,
    infer: |cx| Ok(vec![cx.ty(0)?.clone()]),
    fold: no_fold,
    grad: Grad::Zero("a test op"),
    cost: |cx| cx.elementwise(3),
    memory: crate::ir::op::fresh,
    body: Body::None("a test op"),
};

/// A forward part of `forward` ops over vectors of four sizes, then backward ops that read it in rough reverse.
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
