//! What an attention computes, told from its dataflow: operands, scale, softcap, mask, and what stands in the way of one
//! fused op.
//!
//! From the softmax the walk goes back to the product of queries and keys (masks, softcap, scale, casts) and forward to
//! the product with the values (guards, casts). Queries and keys are followed through their scales; which value is the
//! keys before they were transposed, and before heads were repeated for grouped queries, is told from where its elements
//! go ([`Elements`]), whatever layout ops do it.

use super::mask::{self, Mask, Part, Step};
use super::mask_saturation::may_hide;
use crate::analysis::matcher::Reading;
use crate::analysis::symbolic_elements::Element;
use crate::ir::op::OpClass;
use crate::ir::{DType, Dim, Node, NodeId, ValueId};
use crate::ops::rule::compute_type;
use crate::ops::{activation, arith, cast, logic, matmul, shape};

/// Longest walk.
pub(super) const MAX_STEPS: usize = 24;

/// What a query gives that minus infinity lets see no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blind {
    Zeros,
    /// The softmax of nothing.
    NaN,
}

/// Keys as a fused op takes them: [.., heads, keys, size].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    Value(ValueId),
    /// The transpose of this, of its last two axes.
    Transpose(ValueId),
}

impl Keys {
    pub fn value(self) -> ValueId {
        match self {
            Keys::Value(v) | Keys::Transpose(v) => v,
        }
    }
}

/// One attention.
#[derive(Clone, Debug)]
pub struct Form {
    pub softmax: NodeId,
    pub queries: ValueId,
    pub keys: Keys,
    pub values: ValueId,
    /// The scores are `scale · q·kᵀ`, then capped, then masked.
    pub scale: f64,
    /// `softcap · tanh(x / softcap)`; 0 for none.
    pub softcap: f64,
    pub mask: Mask,
    pub blind: Blind,
    /// What a fused op computes in its place: [.., heads, queries, value size].
    pub output: ValueId,
    /// Scores that have the shape masks broadcast to: [.., heads, queries, keys].
    pub scores: ValueId,
    /// That shape.
    pub dims: Vec<Dim>,
    pub heads: Dim,
    pub kv_heads: Dim,
    pub head_size: Dim,
    /// Why it is no one fused op.
    pub obstacle: Option<String>,
}

/// What is found on the way from the softmax back to the product.
struct Before {
    product: NodeId,
    factor: f64,
    softcap: f64,
    steps: Vec<Step>,
    alive: Option<ValueId>,
    /// The outermost masked scores: masks broadcast to their shape.
    masked: Option<ValueId>,
    obstacle: Option<String>,
}

/// What is found on the way from the softmax to the product with the values.
struct After {
    product: NodeId,
    blind: Blind,
    obstacle: Option<String>,
}

impl<'g> Reading<'g> {
    /// The form of the attention around a softmax; `None` where there is none.
    pub fn attention(&mut self, softmax: NodeId) -> Option<Form> {
        let node = self.graph.node(softmax);
        let input = node.ins[0]?;
        let dims = self.graph.ty(input).dims.clone();
        if dims.len() < 3 {
            return None;
        }
        let before = self.before(softmax)?;
        let after = self.after(softmax)?;
        let mut obstacle = before.obstacle.or(after.obstacle);
        let axis = node.attrs.int("axis");
        if axis != -1 && axis != dims.len() as i64 - 1 {
            return None;
        }
        let (left, right) = self.factors(before.product)?;
        let values = self.graph.node(after.product).ins[1]?;
        if self.graph.ty(left).rank() < 3
            || self.graph.ty(right).rank() < 3
            || self.graph.ty(values).rank() < 3
        {
            return None;
        }
        let dtype = self.graph.ty(self.graph.node(after.product).outs[0]).dtype;
        let (queries, q_factor) = self.unscaled(left, dtype);
        let (keys, values, k_factor, repeats) = self.keys_and_values(queries, right, values, dtype);
        let same = |v: ValueId| self.graph.ty(v).dtype == dtype;
        if !(same(queries) && same(keys.value()) && same(values)) {
            obstacle.get_or_insert("queries, keys and values have different types".into());
        }
        let scores = before
            .masked
            .unwrap_or(self.graph.node(before.product).outs[0]);
        let dims = self.graph.ty(scores).dims.clone();
        let (graph, flow) = (self.graph, self.flow);
        let mask = mask::mask(
            graph,
            &mut self.elements,
            &before.steps,
            &dims,
            &mut |elements, bias| may_hide(graph, flow, elements, bias),
            &|bias| flow.active[bias],
        );
        if mask.parts.iter().any(|p| self.is_too_wide(p, dtype)) {
            obstacle.get_or_insert("the bias is wider than the scores".into());
        }
        if let Some(reason) = mask.obstacle {
            obstacle.get_or_insert(reason.into());
        }
        let (output, blind, guard) = self.output(after.product, before.alive, after.blind);
        if let Some(reason) = guard {
            obstacle.get_or_insert(reason);
        }
        if let Some(reason) = self.shapes([queries, keys.value(), values, output], &repeats, &dims)
        {
            obstacle.get_or_insert(reason);
        }
        let mut scale = before.factor * q_factor * k_factor;
        if before.softcap != 0.0 {
            scale *= before.softcap;
        }
        if !scale.is_finite() {
            obstacle.get_or_insert("the scale is not a number".into());
        }
        // The attribute of the op is a float32, which float64 scores need not be content with.
        let wide = self.graph.ty(scores).dtype == DType::F64;
        if wide && f64::from(before.softcap as f32) != before.softcap {
            obstacle.get_or_insert("the soft cap is no number of float32".into());
        }
        let rank = self.graph.ty(queries).rank();
        let (heads, kv_heads) = self.heads(queries, keys, left, right, &dims);
        Some(Form {
            softmax,
            queries,
            keys,
            values,
            scale,
            softcap: before.softcap,
            mask,
            blind,
            output,
            scores,
            dims,
            heads,
            kv_heads,
            head_size: self.graph.ty(queries).dims[rank - 1].clone(),
            obstacle,
        })
    }

    fn is_product(&self, id: NodeId) -> bool {
        self.graph.node(id).op == &matmul::MATMUL
    }

    /// Whether the scores come from here: a product behind a few elementwise steps.
    fn leads_to_product(&self, mut v: ValueId) -> bool {
        for _ in 0..MAX_STEPS {
            let Some((id, node)) = self.made_by(v) else {
                return false;
            };
            if self.is_product(id) {
                return node.ins.iter().flatten().all(|x| self.flow.active[*x]);
            }
            let elementwise = matches!(node.op.class, OpClass::Elementwise | OpClass::Cast);
            let layout = node.op == &shape::RESHAPE || node.op == &shape::IDENTITY;
            if !elementwise && !layout {
                return false;
            }
            let next = node.ins.iter().flatten().find(|x| self.flow.active[**x]);
            match next {
                Some(next) => v = *next,
                None => return false,
            }
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
            obstacle: None,
        };
        let mut capped = false;
        let mut v = graph.node(softmax).ins[0]?;
        for _ in 0..MAX_STEPS {
            if !self.is_inner(v) {
                found
                    .obstacle
                    .get_or_insert("the scores are read elsewhere, too".into());
            }
            let (id, node) = self.made_by(v)?;
            if self.is_product(id) {
                found.product = id;
                return Some(found);
            }
            let x = node.ins[0]?;
            let out = graph.ty(node.outs[0]);
            if node.op == &cast::CAST && graph.ty(x).dtype.is_float() || node.op == &shape::IDENTITY
            {
                v = x;
            } else if node.op == &shape::RESHAPE {
                let (from, to) = (&graph.ty(x).dims, &out.dims);
                let tail = |d: &[Dim]| d[d.len().saturating_sub(2)..].to_vec();
                if from.len() < 3 || tail(from) != tail(to) {
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
                let (next, step) = self.masked(node)?;
                if graph.ty(next).dims != out.dims {
                    found
                        .obstacle
                        .get_or_insert("the mask has more rows than the scores".into());
                }
                if capped {
                    found
                        .obstacle
                        .get_or_insert("the scores are masked before they are capped".into());
                }
                let first = *found.masked.get_or_insert(v);
                if graph.ty(first).dims != out.dims {
                    found
                        .obstacle
                        .get_or_insert("masks are applied in different shapes".into());
                }
                let step = match step {
                    Step::Bias(m) => match mask::without_dead_rows(graph, &mut self.elements, m) {
                        Some((inner, alive)) => {
                            found.alive = Some(alive);
                            Step::Bias(inner)
                        }
                        None => Step::Bias(m),
                    },
                    step => step,
                };
                if found.factor != 1.0 && !self.is_scale_free(&step, found.factor) {
                    found
                        .obstacle
                        .get_or_insert("the mask is scaled with the scores".into());
                }
                found.steps.push(step);
                v = next;
            } else {
                return None;
            }
        }
        None
    }

    /// The scores and the mask of a node that joins them.
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
        let (scores, other) = if keep {
            (then, otherwise)
        } else {
            (otherwise, then)
        };
        if !keep && !self.leads_to_product(scores) {
            return None;
        }
        let fill = self.elements.number(other)?;
        Some((
            scores,
            Step::Fill {
                condition,
                keep,
                fill,
            },
        ))
    }

    /// Whether a positive factor changes nothing about a mask: it is 0 or minus infinity everywhere.
    fn is_scale_free(&mut self, step: &Step, factor: f64) -> bool {
        let low = f64::NEG_INFINITY;
        let is_free = match step {
            Step::Fill { fill, .. } => *fill == low,
            Step::Bias(v) => {
                let dims = self.graph.ty(*v).dims.clone();
                match self.elements.ask(*v, &dims) {
                    Element::Either(_, a, b) => (a == 0.0 && b == low) || (a == low && b == 0.0),
                    other => other.number() == Some(0.0),
                }
            }
        };
        is_free && factor > 0.0
    }

    fn after(&mut self, softmax: NodeId) -> Option<After> {
        let graph = self.graph;
        let mut found = After {
            product: softmax,
            blind: Blind::NaN,
            obstacle: None,
        };
        let mut v = graph.node(softmax).outs[0];
        for _ in 0..MAX_STEPS {
            if self.is_output(v) {
                found
                    .obstacle
                    .get_or_insert("the probabilities are an output of the model".into());
            }
            let uses = self.uses(v);
            if let Some(guarded) = self.guarded(v) {
                if uses.len() != 2 {
                    found
                        .obstacle
                        .get_or_insert("the probabilities are read elsewhere, too".into());
                }
                found.blind = Blind::Zeros;
                v = guarded;
                continue;
            }
            let mut next = None;
            for u in &uses {
                let node = graph.node(u.node);
                if self.is_product(u.node) && u.slot == 0 {
                    found.product = u.node;
                    if uses.len() > 1 {
                        found
                            .obstacle
                            .get_or_insert("the probabilities are read elsewhere, too".into());
                    }
                    return Some(found);
                }
                let cast = node.op == &cast::CAST && graph.ty(node.outs[0]).dtype.is_float();
                let same_rows = || {
                    let (from, to) = (&graph.ty(v).dims, &graph.ty(node.outs[0]).dims);
                    let tail = |d: &[Dim]| d[d.len().saturating_sub(2)..].to_vec();
                    to.len() >= 3 && tail(from) == tail(to)
                };
                if cast || node.op == &shape::IDENTITY {
                    next.get_or_insert(node.outs[0]);
                } else if node.op == &shape::RESHAPE && u.slot == 0 && same_rows() {
                    next.get_or_insert(node.outs[0]);
                } else if matches!(node.op.class, OpClass::Elementwise) {
                    found.obstacle.get_or_insert(
                        "the probabilities are changed before they weigh the values (dropout)"
                            .into(),
                    );
                    next.get_or_insert(node.outs[0]);
                }
            }
            if uses.len() > 1 {
                found
                    .obstacle
                    .get_or_insert("the probabilities are read elsewhere, too".into());
            }
            v = next?;
        }
        None
    }

    /// `Where(IsNaN(v), 0, v)`.
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

    /// What the fused op is to compute, and what it gives where no key is seen.
    fn output(
        &mut self,
        product: NodeId,
        alive: Option<ValueId>,
        blind: Blind,
    ) -> (ValueId, Blind, Option<String>) {
        let y = self.graph.node(product).outs[0];
        let Some(alive) = alive else {
            return (y, blind, None);
        };
        let reader = match self.uses(y).as_slice() {
            [u] if u.slot == 1 && !self.is_output(y) => Some(self.graph.node(u.node)),
            _ => None,
        };
        if let Some(node) = reader
            && node.op == &logic::WHERE
            && node.ins[0] == Some(alive)
            && node.ins[2].is_some_and(|zero| self.elements.number(zero) == Some(0.0))
            && self.graph.ty(node.outs[0]).dims == self.graph.ty(y).dims
        {
            return (node.outs[0], Blind::Zeros, None);
        }
        let reason = "rows that see no key are handled in a way of their own";
        (y, blind, Some(reason.into()))
    }

    /// Whether a bias has more digits than the scores are computed with.
    fn is_too_wide(&self, part: &Part, dtype: DType) -> bool {
        let Part::Bias(value) = part else {
            return false;
        };
        let bytes = |d: DType| compute_type(d).size_bytes();
        bytes(self.graph.ty(*value).dtype) > bytes(dtype)
    }

    fn factors(&self, product: NodeId) -> Option<(ValueId, ValueId)> {
        let ins = &self.graph.node(product).ins;
        Some((ins[0]?, ins[1]?))
    }
}
