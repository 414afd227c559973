//! The operands of an attention: queries and keys without their scales, keys as they were before they were transposed,
//! keys and values as they were before heads were repeated.

use super::form::{Keys, MAX_STEPS};
use crate::analysis::matcher::Reading;
use crate::analysis::symbolic_elements::index_variable;
use crate::ir::build::same_dims;
use crate::ir::op::OpClass;
use crate::ir::{Dim, Node, Same, ValueId};
use crate::ops::{arith, cast, shape};

impl Reading<'_> {
    /// A value before it is multiplied by a number or made wider, and that number.
    pub(super) fn unscaled(&mut self, mut v: ValueId, dtype: crate::ir::DType) -> (ValueId, f64) {
        let (mut best, mut factor) = (v, 1.0);
        let mut so_far = 1.0;
        for _ in 0..MAX_STEPS {
            let Some((_, node)) = self.made_by(v) else {
                break;
            };
            if let Some((next, by)) = self.scaled(node) {
                so_far *= by;
                v = next;
            } else if node.op == &shape::IDENTITY
                || (node.op == &cast::CAST && self.widens(node, dtype))
            {
                let Some(x) = node.ins[0] else { break };
                v = x;
            } else {
                break;
            }
            if self.graph.ty(v).dtype == dtype || self.graph.ty(best).dtype != dtype {
                (best, factor) = (v, so_far);
            }
        }
        (best, factor)
    }

    /// Whether a cast only makes `dtype` wider.
    fn widens(&self, node: &Node, dtype: crate::ir::DType) -> bool {
        let Some(x) = node.ins[0] else { return false };
        let (from, to) = (self.graph.ty(x).dtype, self.graph.ty(node.outs[0]).dtype);
        from == to || (from == dtype && to.size_bytes() > from.size_bytes())
    }

    /// Keys and values before heads were repeated, the number keys were scaled by, and how often heads repeat.
    pub(super) fn keys_and_values(
        &mut self,
        queries: ValueId,
        right: ValueId,
        values: ValueId,
        dtype: crate::ir::DType,
    ) -> (Keys, ValueId, f64, Dim) {
        let q = self.graph.ty(queries).dims.clone();
        let keys = self.places(right, &q, true, dtype);
        let vals = self.places(values, &q, false, dtype);
        // The deepest places where both have the same number of heads.
        for k in keys.iter().rev() {
            if let Some(v) = vals.iter().find(|v| v.repeats == k.repeats)
                && !k.repeats.is_one()
            {
                return (Keys::Value(k.value), v.value, k.factor, k.repeats.clone());
            }
        }
        let v = vals.iter().find(|v| v.repeats.is_one());
        let v = v.map_or(values, |v| v.value);
        match keys.iter().find(|k| k.repeats.is_one()) {
            Some(k) => (Keys::Value(k.value), v, k.factor, Dim::ONE),
            None => {
                let (plain, factor) = self.unscaled(right, dtype);
                (Keys::Transpose(plain), v, factor, Dim::ONE)
            }
        }
    }

    /// Values that hold the elements of `v` in order, each element of a head perhaps for several heads of `v`.
    fn places(
        &mut self,
        mut v: ValueId,
        queries: &[Dim],
        transposed: bool,
        dtype: crate::ir::DType,
    ) -> Vec<Held> {
        let dims = self.graph.ty(v).dims.clone();
        let rank = dims.len();
        let mut found = Vec::new();
        if rank != queries.len() {
            return found;
        }
        // The space of the product: where the operand has one head for all, all heads ask for it.
        let head = rank - 3;
        let mut space = dims.clone();
        space[head] = queries[head].clone();
        self.elements.enter(&space);
        let mut at: Vec<Dim> = (0..rank).map(index_variable).collect();
        let mut wanted = at.clone();
        if transposed {
            wanted.swap(rank - 1, rank - 2);
        }
        if dims[head].is_one() {
            at[head] = Dim::ZERO;
        }
        let mut factor = 1.0;
        for _ in 0..MAX_STEPS {
            let ty = self.graph.ty(v);
            if ty.rank() == rank
                && ty.dtype == dtype
                && (0..rank).all(|i| i == head || at[i] == wanted[i])
                && let Some(repeats) = queries[head].exact_div(&ty.dims[head])
                && (at[head] == wanted[head].div(&repeats)
                    || (ty.dims[head].is_one() && at[head] == Dim::ZERO))
            {
                found.push(Held {
                    value: v,
                    factor,
                    repeats,
                });
            }
            let Some((id, node)) = self.made_by(v) else {
                break;
            };
            if let Some((next, by)) = self.scaled(node) {
                factor *= by;
                v = next;
            } else if node.op == &cast::CAST && self.widens(node, dtype) {
                let Some(x) = node.ins[0] else { break };
                v = x;
            } else {
                let slot = node.outs.iter().position(|o| *o == v).unwrap_or(0);
                self.elements.enter(&space);
                match self.elements.source(id, slot, &at) {
                    Some((x, to)) => (v, at) = (x, to),
                    None => break,
                }
            }
        }
        found
    }

    /// Why shapes do not fit one fused op.
    pub(super) fn shapes(
        &self,
        [queries, keys, values, output]: [ValueId; 4],
        repeats: &Dim,
        dims: &[Dim],
    ) -> Option<String> {
        let ty = |v: ValueId| &self.graph.ty(v).dims;
        let (q, k, v) = (ty(queries), ty(keys), ty(values));
        let rank = q.len();
        if k.len() != rank || v.len() != rank {
            return Some("queries, keys and values have different ranks".into());
        }
        let head = rank - 3;
        let same = |a: &Dim, b: &Dim| a.same(b) == Same::Yes;
        let heads = |x: &[Dim]| same(&x[head].mul(repeats), &q[head]);
        if !heads(k) || !heads(v) || (0..head).any(|i| !same(&q[i], &k[i]) || !same(&q[i], &v[i])) {
            return Some("keys or values are broadcast to the queries".into());
        }
        // Scores seen through a reshape: leading axes are split or merged.
        let leading = |d: &[Dim]| Dim::product(&d[..d.len() - 2]);
        if !same(&leading(dims), &leading(q)) {
            return Some("the scores have another shape than queries and keys give them".into());
        }
        // The result stands as the scores do, or as the queries do.
        let y = ty(output);
        let rows = |x: &[Dim]| same_dims(&x[..x.len() - 2], &y[..y.len() - 2]);
        if !rows(dims) && !rows(q) {
            return Some("the result has another shape than the queries give it".into());
        }
        if dims.len() != rank && !repeats.is_one() {
            return Some("scores of grouped queries are seen in another shape".into());
        }
        None
    }

    /// How many heads there are; where they are merged with the batch, as far as the sizes tell.
    pub(super) fn heads(
        &self,
        queries: ValueId,
        keys: Keys,
        left: ValueId,
        right: ValueId,
        scores: &[Dim],
    ) -> (Dim, Dim) {
        if scores.len() > self.graph.ty(queries).rank() {
            let heads = scores[scores.len() - 3].clone();
            return (heads.clone(), heads);
        }
        let of = |v: ValueId, through: ValueId, size_axis: usize| -> Dim {
            let dims = &self.graph.ty(v).dims;
            let head = &dims[dims.len() - 3];
            if dims.len() > 3 {
                return head.clone();
            }
            self.split_heads(through, &dims[size_axis])
                .unwrap_or_else(|| match head.terms().as_slice() {
                    [(names, n)] if !names.is_empty() => Dim::from(*n),
                    _ => head.clone(),
                })
        };
        let rank = self.graph.ty(queries).rank();
        let key_axis = match keys {
            Keys::Value(_) => rank - 1,
            Keys::Transpose(_) => rank - 2,
        };
        (
            of(queries, left, rank - 1),
            of(keys.value(), right, key_axis),
        )
    }

    /// The heads that the last axis of a value held before it was split into heads of this size.
    fn split_heads(&self, mut v: ValueId, size: &Dim) -> Option<Dim> {
        for _ in 0..MAX_STEPS {
            let (_, node) = self.made_by(v)?;
            let x = node.ins.iter().flatten().find(|x| self.flow.active[**x])?;
            let dims = &self.graph.ty(*x).dims;
            if node.op == &shape::RESHAPE
                && let Some(heads) = dims.last()?.exact_div(size)
                && !heads.is_one()
                && heads.as_const().is_some()
            {
                return Some(heads);
            }
            let scaled = node.op == &arith::MUL || node.op == &arith::DIV;
            if !node.op.is_layout() && !scaled && node.op.class != OpClass::Cast {
                return None;
            }
            v = *x;
        }
        None
    }
}

/// A value that holds another's elements.
struct Held {
    value: ValueId,
    factor: f64,
    /// How many heads of the product read one of its heads.
    repeats: Dim,
}
