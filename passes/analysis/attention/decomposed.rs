//! What a decomposed attention computes: operands, scale, softcap, mask, and why one op could not compute it.
//!
//! From the softmax the walk goes back to the product of queries and keys (masks, softcap, scale, casts) and forward to
//! the product with the values (guards, casts). Queries and keys are followed through their scales. Which value holds the
//! keys before they were transposed, and before heads were repeated for grouped queries, follows from the indices of its
//! elements ([`symbolic_elements`](crate::analysis::symbolic_elements)), whatever layout ops moved them.

use super::mask::{self, Mask, MaskOperand, Step};
use super::sinks::Sink;
use crate::analysis::matcher::Matcher;
use crate::analysis::symbolic_elements::{Element, index_variable};
use crate::ir::op::OpClass;
use crate::ir::same_dims;
use crate::ir::{DType, Dim, Node, NodeId, Same, ValueId};
use crate::ops::rule::compute_type;
use crate::ops::{activation, arith, cast, logic, matmul, shape};

/// Longest walk.
const MAX_STEPS: usize = 24;

const SCALED_MASK: &str = "the mask is scaled with the scores";

/// The result for a query that sees no key because all its scores are minus infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyRows {
    /// Zeros.
    Zeros,
    /// The softmax of nothing.
    NaN,
}

/// Keys as a fused op reads them: [.., heads, keys, size].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// This value.
    Value(ValueId),
    /// This value with its last two axes swapped.
    Transpose(ValueId),
}

impl Keys {
    /// Returns the value, transposed or not.
    pub fn value(self) -> ValueId {
        match self {
            Keys::Value(v) | Keys::Transpose(v) => v,
        }
    }
}

/// The first reason that was found why one op cannot compute an attention.
#[derive(Clone, Copy, Debug, Default)]
pub struct Obstacle(pub Option<&'static str>);

impl Obstacle {
    /// Returns true if there is no reason.
    pub fn is_none(self) -> bool {
        self.0.is_none()
    }

    fn note(&mut self, applies: bool, why: &'static str) {
        if applies {
            self.0.get_or_insert(why);
        }
    }
}

/// One attention of several ops.
#[derive(Clone, Debug)]
pub struct Decomposed {
    /// [.., heads, queries, size].
    pub queries: ValueId,
    /// Keys, transposed or not.
    pub keys: Keys,
    /// [.., key heads, keys, value size].
    pub values: ValueId,
    /// The scores are `scale · q·kᵀ`, then capped, then masked.
    pub scale: f64,
    /// `softcap · tanh(x / softcap)`; 0 for none.
    pub softcap: f64,
    /// How scores are masked.
    pub mask: Mask,
    /// The result for queries that see no key.
    pub empty_rows: EmptyRows,
    /// The attention sink: one more score for each query, [.., heads, queries, 1], without a value vector.
    pub sink: Option<ValueId>,
    /// The value that one op would compute: [.., heads, queries, value size].
    pub output: ValueId,
    /// Scores of the shape that masks broadcast to: [.., heads, queries, keys].
    pub scores: ValueId,
    /// That shape.
    pub dims: Vec<Dim>,
    /// Number of heads.
    pub heads: Dim,
    /// Number of heads of keys and values.
    pub kv_heads: Dim,
    /// Elements of a query of one head.
    pub head_size: Dim,
    /// Why one op could not compute it.
    pub obstacle: Obstacle,
}

/// What the walk from the softmax back to the product finds.
struct Before {
    product: NodeId,
    factor: f64,
    softcap: f64,
    steps: Vec<Step>,
    /// The boolean that is false in rows in which every key is hidden.
    alive: Option<ValueId>,
    /// The outermost masked scores: masks broadcast to their shape.
    masked: Option<ValueId>,
    sink: Option<Sink>,
    /// A finite number that hides keys is scaled with the scores.
    scales_lows: bool,
    obstacle: Obstacle,
}

/// What the walk from the softmax to the product with the values finds.
struct After {
    product: NodeId,
    empty_rows: EmptyRows,
}

/// A value that holds another's elements.
struct Held {
    value: ValueId,
    factor: f64,
    /// Number of heads of the product that read one of its heads.
    repeats: Dim,
}

/// Returns true if a shape of three or more axes has the same last two as another.
fn keeps_rows(wide: &[Dim], other: &[Dim]) -> bool {
    let tail = |d: &[Dim]| d[d.len().saturating_sub(2)..].to_vec();
    wide.len() >= 3 && tail(wide) == tail(other)
}

impl<'g> Matcher<'g> {
    /// Returns the attention around a softmax, if there is one.
    pub fn attention(&mut self, softmax: NodeId) -> Option<Decomposed> {
        let (graph, flow) = (self.graph, self.flow);
        let node = graph.node(softmax);
        let rank = graph.ty(node.ins[0]?).rank();
        if rank < 3 {
            return None;
        }
        let before = self.before(softmax)?;
        let mut obstacle = before.obstacle;
        let after = self.after(softmax, before.sink, &mut obstacle)?;
        let axis = node.attrs.int("axis");
        if axis != -1 && axis != rank as i64 - 1 {
            return None;
        }
        let factors = &graph.node(before.product).ins;
        let (left, right) = (factors[0]?, factors[1]?);
        let values = graph.node(after.product).ins[1]?;
        if [left, right, values]
            .iter()
            .any(|v| graph.ty(*v).rank() < 3)
        {
            return None;
        }
        let dtype = graph.ty(graph.node(after.product).outs[0]).dtype;
        let (queries, q_factor) = self.unscaled(left, dtype);
        let (keys, values, k_factor, repeats) = self.keys_and_values(queries, right, values, dtype);
        let all = [queries, keys.value(), values];
        obstacle.note(
            all.iter().any(|v| graph.ty(*v).dtype != dtype),
            "queries, keys and values have different types",
        );
        let product = graph.node(before.product).outs[0];
        let scores = before.masked.unwrap_or(product);
        let dims = graph.ty(scores).dims.clone();
        if let Some(sink) = before.sink {
            let reason = self.sink_obstacle(sink, graph.ty(scores));
            obstacle.0 = obstacle.0.or(reason);
        }
        let mask = mask::mask(graph, flow, &mut self.elements, &before.steps, &dims);
        obstacle.note(
            mask.operands.iter().any(|o| self.is_too_wide(o, dtype)),
            "the bias is wider than the scores",
        );
        // In a row that sees no key, the weights depend on the low numbers themselves.
        let has_empty_rows = !mask.operands.is_empty() || !mask.band_shows_all;
        obstacle.note(before.scales_lows && has_empty_rows, SCALED_MASK);
        obstacle.0 = obstacle.0.or(mask.obstacle);
        let product = graph.node(after.product).outs[0];
        let guarded = before.alive.map(|alive| self.zeroed_rows(product, alive));
        obstacle.note(
            guarded == Some(None),
            "rows that see no key are handled in a way of their own",
        );
        let (output, empty_rows) = match guarded.flatten() {
            Some(output) => (output, EmptyRows::Zeros),
            None => (product, after.empty_rows),
        };
        let shapes = [queries, keys.value(), values, output];
        obstacle.0 = obstacle.0.or_else(|| self.misfit(shapes, &repeats, &dims));
        let mut scale = before.factor * q_factor * k_factor;
        if before.softcap != 0.0 {
            scale *= before.softcap;
        }
        obstacle.note(!scale.is_finite(), "the scale is not a number");
        // The attribute of the op is a float32, which may be too coarse for float64 scores.
        let is_f64 = graph.ty(scores).dtype == DType::F64;
        obstacle.note(
            is_f64 && f64::from(before.softcap as f32) != before.softcap,
            "the soft cap is no number of float32",
        );
        let (heads, kv_heads) = self.heads(queries, keys, left, right, &dims);
        Some(Decomposed {
            queries,
            keys,
            values,
            scale,
            softcap: before.softcap,
            mask,
            empty_rows,
            sink: before.sink.map(|s| s.value),
            output,
            scores,
            dims,
            heads,
            kv_heads,
            head_size: graph.ty(queries).dims.last()?.clone(),
            obstacle,
        })
    }

    fn is_product(&self, id: NodeId) -> bool {
        self.graph.node(id).op == &matmul::MATMUL
    }

    /// Returns true if a value is a product of activations behind a few elementwise steps: the scores.
    pub(super) fn leads_to_product(&self, mut v: ValueId) -> bool {
        for _ in 0..MAX_STEPS {
            let Some((id, node)) = self.producer(v) else {
                return false;
            };
            if self.is_product(id) {
                return node.operands().all(|x| self.flow.active[x]);
            }
            let is_elementwise = matches!(node.op.class, OpClass::Elementwise | OpClass::Cast);
            if !is_elementwise && node.op != &shape::RESHAPE && node.op != &shape::IDENTITY {
                return false;
            }
            let Some(next) = node.operands().find(|x| self.flow.active[*x]) else {
                return false;
            };
            v = next;
        }
        false
    }

    fn before(&mut self, softmax: NodeId) -> Option<Before> {
        let graph = self.graph;
        let mut found = Before {
            product: softmax,
            factor: 1.0,
            softcap: 0.0,
            steps: Vec::new(),
            alive: None,
            masked: None,
            sink: None,
            scales_lows: false,
            obstacle: Obstacle::default(),
        };
        let mut capped = false;
        let mut v = graph.node(softmax).ins[0]?;
        for _ in 0..MAX_STEPS {
            let obstacle = &mut found.obstacle;
            obstacle.note(!self.is_inner(v), "the scores are read elsewhere, too");
            let is_plain = found.steps.is_empty() && !capped && found.sink.is_none();
            if is_plain && let Some(x) = self.unshifted(v) {
                v = x;
            }
            let (id, node) = self.producer(v)?;
            if self.is_product(id) {
                found.product = id;
                return Some(found);
            }
            let x = node.ins[0]?;
            let dims = &graph.ty(node.outs[0]).dims;
            if is_plain
                && found.factor == 1.0
                && let Some((scores, sink)) = self.joined(node)
            {
                (v, found.sink) = (scores, Some(sink));
            } else if node.op == &cast::CAST && graph.ty(x).dtype.is_float()
                || node.op == &shape::IDENTITY
            {
                v = x;
            } else if node.op == &shape::RESHAPE {
                if !keeps_rows(&graph.ty(x).dims, dims) {
                    return None;
                }
                v = x;
            } else if let Some((next, factor)) = self.scaled(node) {
                found.factor *= factor;
                v = next;
            } else if node.op == &activation::TANH {
                if capped || found.factor <= 0.0 {
                    return None;
                }
                capped = true;
                (found.softcap, found.factor) = (found.factor, 1.0);
                v = x;
            } else if node.op == &arith::ADD || node.op == &logic::WHERE {
                let (next, mut step) = self.masked(node)?;
                let is_wider = graph.ty(next).dims != *dims;
                obstacle.note(is_wider, "the mask has more rows than the scores");
                obstacle.note(capped, "the scores are masked before they are capped");
                let first = *found.masked.get_or_insert(v);
                let is_other = graph.ty(first).dims != *dims;
                obstacle.note(is_other, "masks are applied in different shapes");
                if let Step::Bias(m) = step
                    && let Some((inner, alive)) =
                        mask::without_dead_rows(graph, &mut self.elements, m)
                {
                    found.alive = Some(alive);
                    step = Step::Bias(inner);
                }
                let factor = found.factor;
                if factor != 1.0 && !self.is_scale_free(&step, factor, f64::NEG_INFINITY) {
                    found.scales_lows = true;
                    let hides = self.is_scale_free(&step, factor, mask::HIDDEN);
                    obstacle.note(!hides, SCALED_MASK);
                }
                found.steps.push(step);
                v = next;
            } else {
                return None;
            }
        }
        None
    }

    /// Returns the scores and the mask that a node joins.
    fn masked(&mut self, node: &Node) -> Option<(ValueId, Step)> {
        if node.op == &arith::ADD {
            let (a, b) = (node.ins[0]?, node.ins[1]?);
            if self.leads_to_product(a) {
                return Some((a, Step::Bias(b)));
            }
            return self.leads_to_product(b).then_some((b, Step::Bias(a)));
        }
        let (condition, then, otherwise) = (node.ins[0]?, node.ins[1]?, node.ins[2]?);
        let keep = self.leads_to_product(then);
        if !keep && !self.leads_to_product(otherwise) {
            return None;
        }
        let (scores, other) = match keep {
            true => (then, otherwise),
            false => (otherwise, then),
        };
        let step = Step::Fill {
            condition,
            keep,
            fill: self.elements.number(other)?,
        };
        Some((scores, step))
    }

    /// Returns true if a mask is 0 or at most `low` everywhere, before and after it is multiplied by a positive factor.
    fn is_scale_free(&mut self, step: &Step, factor: f64, low: f64) -> bool {
        let is_low = |x: f64| x.max(x * factor) <= low;
        let is_free = match step {
            Step::Fill { fill, .. } => is_low(*fill),
            Step::Bias(v) => {
                let dims = self.graph.ty(*v).dims.clone();
                match self.elements.ask(*v, &dims) {
                    Element::Either(_, a, b) => (a == 0.0 && is_low(b)) || (is_low(a) && b == 0.0),
                    other => other.number() == Some(0.0),
                }
            }
        };
        is_free && factor > 0.0
    }

    fn after(
        &mut self,
        softmax: NodeId,
        mut sink: Option<Sink>,
        obstacle: &mut Obstacle,
    ) -> Option<After> {
        const READ_ELSEWHERE: &str = "the probabilities are read elsewhere, too";
        let graph = self.graph;
        let mut empty_rows = EmptyRows::NaN;
        let mut v = graph.node(softmax).outs[0];
        for _ in 0..MAX_STEPS {
            let is_output = self.is_output(v);
            obstacle.note(is_output, "the probabilities are an output of the model");
            let uses = self.uses(v);
            if let Some(guarded) = self.guarded(v) {
                obstacle.note(uses.len() != 2, READ_ELSEWHERE);
                empty_rows = EmptyRows::Zeros;
                v = guarded;
                continue;
            }
            let mut next = None;
            for u in &uses {
                let node = graph.node(u.node);
                if let Some(column) = sink
                    && self.drops(u.node, column)
                {
                    (next, sink) = (Some(node.outs[0]), None);
                    continue;
                }
                if self.is_product(u.node) && u.slot == 0 && sink.is_none() {
                    obstacle.note(uses.len() > 1, READ_ELSEWHERE);
                    return Some(After {
                        product: u.node,
                        empty_rows,
                    });
                }
                let out = graph.ty(node.outs[0]);
                let is_changed = matches!(node.op.class, OpClass::Elementwise);
                if (node.op == &cast::CAST && out.dtype.is_float())
                    || node.op == &shape::IDENTITY
                    || (node.op == &shape::RESHAPE
                        && u.slot == 0
                        && keeps_rows(&out.dims, &graph.ty(v).dims))
                    || is_changed
                {
                    obstacle.note(
                        is_changed,
                        "the probabilities are changed before they weigh the values (dropout)",
                    );
                    next.get_or_insert(node.outs[0]);
                }
            }
            obstacle.note(uses.len() > 1, READ_ELSEWHERE);
            v = next?;
        }
        None
    }

    /// Returns the result of `Where(IsNaN(v), 0, v)`.
    fn guarded(&mut self, v: ValueId) -> Option<ValueId> {
        let graph = self.graph;
        let uses = self.uses(v);
        let choice = uses
            .iter()
            .find(|u| graph.node(u.node).op == &logic::WHERE && u.slot == 2)?;
        let node = graph.node(choice.node);
        let is_nan = graph.node(graph.def_node(node.ins[0]?)?);
        let zero = node.ins[1]?;
        let fits = is_nan.op == &logic::IS_NAN
            && is_nan.ins[0] == Some(v)
            && self.is_inner(is_nan.outs[0])
            && graph.ty(node.outs[0]).dims == graph.ty(v).dims
            && self.elements.number(zero)? == 0.0;
        fits.then_some(node.outs[0])
    }

    /// Returns the result of `Where(alive, y, 0)`, the only reader of `y`.
    fn zeroed_rows(&mut self, y: ValueId, alive: ValueId) -> Option<ValueId> {
        let only = self.sole_use(y).filter(|u| u.slot == 1)?;
        let node = self.graph.node(only.node);
        let fits = node.op == &logic::WHERE
            && node.ins[0] == Some(alive)
            && node.ins[2].is_some_and(|zero| self.elements.number(zero) == Some(0.0))
            && self.graph.ty(node.outs[0]).dims == self.graph.ty(y).dims;
        fits.then_some(node.outs[0])
    }

    /// Returns true if a bias has more digits than the scores are computed with.
    fn is_too_wide(&self, operand: &MaskOperand, dtype: DType) -> bool {
        let MaskOperand::Bias(value) = operand else {
            return false;
        };
        let bytes = |d: DType| compute_type(d).size_bytes();
        bytes(self.graph.ty(*value).dtype) > bytes(dtype)
    }

    /// Returns a value before it is multiplied by a number or widened, and that number.
    fn unscaled(&mut self, mut v: ValueId, dtype: DType) -> (ValueId, f64) {
        let mut best = (v, 1.0);
        let mut factor = 1.0;
        for _ in 0..MAX_STEPS {
            let Some((_, node)) = self.producer(v) else {
                break;
            };
            if let Some((next, by)) = self.scaled(node) {
                factor *= by;
                v = next;
            } else if (node.op == &shape::IDENTITY || self.is_widening(node, dtype))
                && let Some(x) = node.ins[0]
            {
                v = x;
            } else {
                break;
            }
            if self.graph.ty(v).dtype == dtype || self.graph.ty(best.0).dtype != dtype {
                best = (v, factor);
            }
        }
        best
    }

    /// Returns true for casts that only widen `dtype`.
    fn is_widening(&self, node: &Node, dtype: DType) -> bool {
        let Some(x) = node.ins[0].filter(|_| node.op == &cast::CAST) else {
            return false;
        };
        let (from, to) = (self.graph.ty(x).dtype, self.graph.ty(node.outs[0]).dtype);
        from == to || (from == dtype && to.size_bytes() > from.size_bytes())
    }

    /// Returns keys and values before heads were repeated, the number keys were scaled by, and how often heads repeat.
    fn keys_and_values(
        &mut self,
        queries: ValueId,
        right: ValueId,
        values: ValueId,
        dtype: DType,
    ) -> (Keys, ValueId, f64, Dim) {
        let q = self.graph.ty(queries).dims.clone();
        let keys = self.holders(right, &q, true, dtype);
        let vals = self.holders(values, &q, false, dtype);
        // The deepest holders in which both have the same number of heads.
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

    /// Returns the values that hold the elements of `v` in order, where several heads of `v` may show one head.
    fn holders(
        &mut self,
        mut v: ValueId,
        queries: &[Dim],
        transposed: bool,
        dtype: DType,
    ) -> Vec<Held> {
        let dims = self.graph.ty(v).dims.clone();
        let rank = dims.len();
        let mut found = Vec::new();
        if rank != queries.len() {
            return found;
        }
        // The space of the product: all heads read an operand that has one head for all.
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
            let Some((id, node)) = self.producer(v) else {
                break;
            };
            if let Some((next, by)) = self.scaled(node) {
                factor *= by;
                v = next;
            } else if self.is_widening(node, dtype)
                && let Some(x) = node.ins[0]
            {
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

    /// Returns why shapes do not fit one op.
    fn misfit(
        &self,
        [queries, keys, values, output]: [ValueId; 4],
        repeats: &Dim,
        dims: &[Dim],
    ) -> Option<&'static str> {
        let ty = |v: ValueId| &self.graph.ty(v).dims;
        let (q, k, v, y) = (ty(queries), ty(keys), ty(values), ty(output));
        let rank = q.len();
        if k.len() != rank || v.len() != rank {
            return Some("queries, keys and values have different ranks");
        }
        let head = rank - 3;
        let same = |a: &Dim, b: &Dim| a.same(b) == Same::Yes;
        let heads = |x: &[Dim]| same(&x[head].mul(repeats), &q[head]);
        if !heads(k) || !heads(v) || (0..head).any(|i| !same(&q[i], &k[i]) || !same(&q[i], &v[i])) {
            return Some("keys or values are broadcast to the queries");
        }
        // A reshape between may split or merge leading axes.
        let leading = |d: &[Dim]| Dim::product(&d[..d.len() - 2]);
        if !same(&leading(dims), &leading(q)) {
            return Some("the scores have another shape than queries and keys give them");
        }
        // The result has the leading axes of the scores, or those of the queries.
        let rows = |x: &[Dim]| same_dims(&x[..x.len() - 2], &y[..y.len() - 2]);
        if !rows(dims) && !rows(q) {
            return Some("the result has another shape than the queries give it");
        }
        (dims.len() != rank && !repeats.is_one())
            .then_some("scores of grouped queries are seen in another shape")
    }

    /// Returns the numbers of heads and of key heads; where heads are merged with the batch, as far as sizes tell.
    fn heads(
        &self,
        queries: ValueId,
        keys: Keys,
        left: ValueId,
        right: ValueId,
        scores: &[Dim],
    ) -> (Dim, Dim) {
        let rank = self.graph.ty(queries).rank();
        if scores.len() > rank {
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
        let key_axis = match keys {
            Keys::Value(_) => rank - 1,
            Keys::Transpose(_) => rank - 2,
        };
        (
            of(queries, left, rank - 1),
            of(keys.value(), right, key_axis),
        )
    }

    /// Returns the number of heads of this size in the last axis of a value, before a reshape split it.
    fn split_heads(&self, mut v: ValueId, size: &Dim) -> Option<Dim> {
        for _ in 0..MAX_STEPS {
            let (_, node) = self.producer(v)?;
            let x = node.operands().find(|x| self.flow.active[*x])?;
            let dims = &self.graph.ty(x).dims;
            if node.op == &shape::RESHAPE
                && let Some(heads) = dims.last()?.exact_div(size)
                && !heads.is_one()
                && heads.as_const().is_some()
            {
                return Some(heads);
            }
            let is_scaled = node.op == &arith::MUL || node.op == &arith::DIV;
            if !node.op.is_layout() && !is_scaled && node.op.class != OpClass::Cast {
                return None;
            }
            v = x;
        }
        None
    }
}
