//! Reverse-mode differentiation over op rows.
//!
//! In: `Typed` with seeds (see `loss.rs`). Out: `Training`. Nodes are visited once, last to first. The rule of a row emits
//! ordinary nodes, so a rule never declares what it needs saved: liveness sees what the nodes read. Only values on a path
//! from a trained parameter to a seed get a cotangent. A frozen weight has no gradient node and costs no saved activation.
//! Cotangents that meet (tied weights, residuals, shared K/V) are added in the order they arrive, which fixes the bits of
//! the sum. A rule may add its term itself where one op does both. Gradients are outputs `<initializer>.grad`, in the
//! initializer's own layout.
//!
//! Models that take gradients themselves differentiate gradients in turn. Gradient ops need no gradient rule for that. An
//! op without a rule is differentiated through its body: the nodes of the body are emitted on its operands as backward
//! nodes, and differentiated. The op itself stays, so that forward values keep their bits, and only its operands are kept
//! for the gradient. Body nodes are named after the op, planned and priced like others, and removed where no gradient
//! reads them. Bodies consist of standard ops, which all have rules, so there is no body in a body.

use super::loss::Seed;
use crate::error::{Error, Result};
use crate::ir::op::{Body, BodyCx, Grad, GradCx};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Graph, Id, NodeId, OpDef, Phase, Role, Same, SecondaryMap, ValueId};
use crate::ops;
use crate::ops::cast::widest;
use crate::ops::{Builder, EmitExt};
use std::collections::BTreeMap;

/// What the backward pass differs in from a gradient of every op by its own rule.
#[derive(Debug, Default)]
pub struct Notes {
    /// The number of nodes that were differentiated through their bodies, by op.
    pub through_bodies: BTreeMap<&'static str, usize>,
    /// The number of nodes that let no gradient into an operand which depends on a parameter, by op and operand.
    pub stopped: BTreeMap<(&'static str, &'static str), usize>,
    /// The number of gradients that are rounded to floats of 8 bits.
    pub rounded: usize,
}

/// Adds the backward pass of `seeds` with respect to `parameters`.
///
/// # Errors
/// An op on a path to a parameter that has no gradient; the error names it.
pub fn autodiff(graph: &mut Graph, seeds: &[Seed], parameters: &[ValueId]) -> Result<Notes> {
    let forward: Vec<NodeId> = graph.order().to_vec();
    let values = graph.value_bound();
    let mut needs = SecondaryMap::new(graph.value_bound(), false);
    for id in parameters {
        needs[*id] = true;
    }
    let cotangents: SecondaryMap<ValueId, Option<ValueId>> =
        SecondaryMap::new(graph.value_bound(), None);
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    b.role = Role::Backward;
    let mut reverse = Reverse {
        b: &mut b,
        needs,
        cotangents,
        notes: Notes::default(),
        prunable: Vec::new(),
    };
    reverse.reach(&forward);
    for seed in seeds {
        reverse.seed(seed);
    }
    for id in forward.iter().rev() {
        reverse.backward_of(*id)?;
    }
    let Reverse {
        cotangents,
        notes,
        prunable,
        ..
    } = reverse;
    let mut outputs = b.graph.outputs().to_vec();
    for parameter in parameters {
        let name = format!("{}.grad", b.graph.value(*parameter).name);
        if b.graph.has_value_name(&name) {
            return Err(Error::model(
                "name",
                format!("the gradient is called `{name}`, but the model uses that name"),
            ));
        }
        let gradient = finish(&mut b, *parameter, cotangents[*parameter], &outputs)?;
        b.graph.rename_value(gradient, &name);
        outputs.push(gradient);
    }
    graph.set_outputs(outputs);
    prune(graph, &prunable, values);
    graph.phase = Phase::Training;
    Ok(notes)
}

/// The walk back through a graph.
struct Reverse<'a, 'g> {
    b: &'a mut Builder<'g>,
    /// Values that depend on a parameter, and are real numbers.
    needs: SecondaryMap<ValueId, bool>,
    /// The sum of the cotangents that readers of each value gave so far.
    cotangents: SecondaryMap<ValueId, Option<ValueId>>,
    notes: Notes,
    /// Nodes that no gradient may read in the end, in emission order: those of bodies, and gradients of what is stored in 8 bits.
    prunable: Vec<NodeId>,
}

impl Reverse<'_, '_> {
    /// Marks the results of `nodes` that depend on a marked value.
    fn reach(&mut self, nodes: &[NodeId]) {
        let graph = &self.b.graph;
        for id in nodes {
            let node = graph.node(*id);
            let mut wants = node
                .ins
                .iter()
                .enumerate()
                .map(|(i, v)| self.wants(node.op, i, *v));
            if wants.any(|wants| wants) && !matches!(node.op.grad, Grad::Zero(_)) {
                for out in &node.outs {
                    self.needs[*out] = graph.ty(*out).dtype.is_real();
                }
            }
        }
    }

    /// Returns true if a gradient flows into an operand.
    fn wants(&self, op: &OpDef, at: usize, operand: Option<ValueId>) -> bool {
        let is_stopped = op.slot(at).is_some_and(|slot| slot.stopped);
        !is_stopped && operand.is_some_and(|v| self.needs[v])
    }

    fn seed(&mut self, seed: &Seed) {
        if !self.needs[seed.value] {
            return;
        }
        let dy = match seed.cotangent {
            Some(dy) => dy,
            None => {
                let dtype = self.b.ty(seed.value).dtype;
                self.b.scalar(dtype, 1.0)
            }
        };
        self.cotangents[seed.value] = Some(dy);
    }

    fn backward_of(&mut self, id: NodeId) -> Result<()> {
        let node = self.b.graph.node(id);
        let dys: Vec<Option<ValueId>> = node.outs.iter().map(|v| self.cotangents[*v]).collect();
        let operands = node.ins.iter().enumerate();
        let wants: Vec<bool> = operands.map(|(i, v)| self.wants(node.op, i, *v)).collect();
        if dys.iter().all(Option::is_none) || !wants.contains(&true) {
            return Ok(());
        }
        for (at, v) in node.ins.iter().enumerate() {
            if let Some(slot) = node.op.slot(at).filter(|slot| slot.stopped)
                && v.is_some_and(|v| self.needs[v])
            {
                *self
                    .notes
                    .stopped
                    .entry((node.op.name, slot.name))
                    .or_default() += 1;
            }
        }
        self.b.loc = node.loc.clone();
        self.b.prefix = format!("{}/grad", node.name);
        let done = match node.op.grad {
            Grad::Rule(_) | Grad::First(_) => self.by_rule(id, dys, wants),
            Grad::Body => self.through_body(id, dys),
            Grad::Zero(_) => Ok(()),
            Grad::Missing(why) => return Err(missing(self.b.graph, id, why)),
        };
        done.map_err(|e| e.at(format!("the gradient of {}", self.b.graph.describe(id))))
    }

    fn by_rule(&mut self, id: NodeId, dys: Vec<Option<ValueId>>, wants: Vec<bool>) -> Result<()> {
        let op = self.b.graph.node(id).op;
        let ins = self.b.graph.node(id).ins.clone();
        let before = self.b.graph.order().len();
        let so_far = ins
            .iter()
            .map(|v| v.and_then(|v| self.cotangents[v].take()));
        let so_far = so_far.collect();
        let mut cx = GradCx {
            b: &mut *self.b,
            node: id,
            dys,
            dxs: vec![None; ins.len()],
            so_far,
            wants,
        };
        let done = op.grad.apply(&mut cx);
        let (dxs, wants, left) = (cx.dxs, cx.wants, cx.so_far);
        if ins
            .iter()
            .flatten()
            .any(|v| self.b.ty(*v).dtype.is_float8())
        {
            let emitted = &self.b.graph.order()[before..];
            let types = emitted.iter().flat_map(|id| &self.b.graph.node(*id).outs);
            self.notes.rounded += types.filter(|v| self.b.ty(**v).dtype.is_float8()).count();
            self.prunable.extend(emitted);
        }
        // Cotangents that the rule did not add to stay.
        for (v, left) in ins.iter().zip(left) {
            if let (Some(v), Some(left)) = (v, left) {
                self.cotangents[*v] = Some(left);
            }
        }
        done?;
        for (slot, (x, dx)) in ins.iter().zip(dxs).enumerate() {
            match (*x, dx) {
                (Some(x), Some(dx)) if wants[slot] => self.give(id, x, dx)?,
                _ if wants[slot] => {
                    return Err(Error::bug(
                        "autodiff",
                        format!("the rule gave no gradient for operand {slot}"),
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds `dx`, from the gradient of node `id`, to the cotangent of `x`. Cotangents of what is stored in 8 bits may be of
    /// several types.
    fn give(&mut self, id: NodeId, x: ValueId, dx: ValueId) -> Result<()> {
        check_type(self.b.graph, id, x, dx)?;
        self.cotangents[x] = Some(match self.cotangents[x] {
            None => dx,
            Some(earlier) => {
                let wide = widest(self.b.ty(earlier).dtype, self.b.ty(dx).dtype);
                let (earlier, dx) = (self.b.cast(earlier, wide)?, self.b.cast(dx, wide)?);
                self.b.add(earlier, dx)?
            }
        });
        Ok(())
    }

    /// Differentiates `id` through its body; `dys` are the cotangents of its results.
    fn through_body(&mut self, id: NodeId, dys: Vec<Option<ValueId>>) -> Result<()> {
        let node = self.b.graph.node(id);
        let (op, attrs, ins) = (node.op, node.attrs.clone(), node.ins.clone());
        let outs = node.outs.iter().map(|v| self.b.ty(*v).clone()).collect();
        let Body::Function(build) = op.body else {
            return Err(Error::bug("autodiff", format!("{} has no body", op.name)));
        };
        let before = self.b.graph.order().len();
        let results = build(&mut BodyCx {
            b: &mut *self.b,
            attrs: &attrs,
            ins,
            outs,
        })?;
        let body = self.b.graph.order()[before..].to_vec();
        self.reach(&body);
        for (result, dy) in results.into_iter().zip(dys) {
            if let Some(dy) = dy
                && self.needs[result]
            {
                self.give(id, result, dy)?;
            }
        }
        for inner in body.iter().rev() {
            self.backward_of(*inner)?;
        }
        self.prunable.extend(body);
        *self.notes.through_bodies.entry(op.name).or_default() += 1;
        Ok(())
    }
}

fn missing(graph: &Graph, id: NodeId, why: &str) -> Box<Error> {
    let node = graph.node(id);
    let op = node.op_name();
    Error::model("gradient", format!("{op} has no gradient here: {why}"))
        .at(graph.describe(id))
        .help("freeze the parameters before it with --freeze, or export the model without this op")
}

/// Checks that a gradient has the element type and shape of its value. That of a float of 8 bits is wider.
fn check_type(graph: &Graph, id: NodeId, x: ValueId, dx: ValueId) -> Result<()> {
    let (want, got) = (graph.ty(x), graph.ty(dx));
    let is_wider = want.dtype.is_float8() && got.dtype.is_float();
    let fits = (want.dtype == got.dtype || is_wider)
        && want.rank() == got.rank()
        && want
            .dims
            .iter()
            .zip(&got.dims)
            .all(|(a, b)| a.same(b) != Same::No);
    if fits {
        return Ok(());
    }
    Err(Error::bug(
        "autodiff",
        format!(
            "the gradient of `{}` has the wrong type",
            graph.value(x).name
        ),
    )
    .at(graph.describe(id))
    .expected(want.to_string())
    .found(got.to_string()))
}

/// Returns the gradient of a parameter as a value of its own, which can be a graph output.
fn finish(
    b: &mut Builder,
    parameter: ValueId,
    gradient: Option<ValueId>,
    outputs: &[ValueId],
) -> Result<ValueId> {
    b.prefix = b.graph.value(parameter).name.clone();
    b.loc = Default::default();
    let gradient = match gradient {
        Some(gradient) => gradient,
        // The loss does not depend on the parameter.
        None => b.filled_like(parameter, 0.0)?,
    };
    // Two parameters can share one cotangent (x + bias + bias2), and a cotangent can be a graph input.
    if outputs.contains(&gradient) || b.graph.def_node(gradient).is_none() {
        return b.emit(&ops::shape::IDENTITY, &[gradient], Attrs::new());
    }
    Ok(gradient)
}

/// Removes those of the nodes that no gradient reads, and constants that only they read, among the values from `first` on.
fn prune(graph: &mut Graph, nodes: &[NodeId], first: usize) {
    let mut gone = SecondaryMap::new(graph.node_bound(), false);
    for id in nodes.iter().rev() {
        let unread = |v: &ValueId| {
            let readers = graph.value(*v).uses();
            !graph.is_output(*v) && readers.iter().all(|r| gone[r.node])
        };
        gone[*id] = graph.node(*id).outs.iter().all(unread);
    }
    if graph.remove_nodes(&|id| gone[id]) == 0 {
        return;
    }
    let inits = graph.inits();
    let unread = inits
        .filter(|(id, v)| Id::index(*id) >= first && v.uses().is_empty() && !graph.is_output(*id));
    let unread: Vec<ValueId> = unread.map(|(id, _)| id).collect();
    for id in unread {
        graph.remove_source(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn the_gradient_of_a_tied_head_is_added_in_place_to_that_of_the_table() {
        let source = "graph @g typed (%ids: i64[3], %x: f32[3,4], %dy: f32[3,5]) -> (%y) {
  init %w : f32[5,4] = splat 0.5
  %e = Gather %w, %ids {axis=0} : f32[3,4]
  %h = Mul %e, %x : f32[3,4]
  %t = Transpose %w {perm=[1,0]} : f32[4,5]
  %y = MatMul %h, %t : f32[3,5]
}
";
        let mut g = text::parse(source).unwrap();
        let value = |g: &Graph, name: &str| g.find_value(name).unwrap();
        let seed = Seed {
            value: value(&g, "y"),
            cotangent: Some(value(&g, "dy")),
        };
        let w = value(&g, "w");
        autodiff(&mut g, &[seed], &[w]).unwrap();
        let maker = |v: ValueId| g.node(g.def_node(v).unwrap());
        let gradient = maker(value(&g, "w.grad"));
        assert_eq!(gradient.op, &ops::index::GATHER_GRAD);
        // dYᵀ·H, not the transpose of Hᵀ·dY.
        let sum = maker(gradient.ins[3].unwrap());
        assert_eq!(sum.op, &ops::matmul::MATMUL);
        assert_eq!(g.ty(sum.outs[0]).static_dims(), Some(vec![5, 4]));
    }
}
