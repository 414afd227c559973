//! Reverse-mode differentiation over op rows.
//!
//! In: `Typed` with seeds (see `loss.rs`). Out: `Training`. Nodes are visited once, last to first; each row's rule emits
//! ordinary nodes, so what a gradient needs saved is never declared: liveness sees what it reads. Only values on a path
//! from a trained parameter to a seed get a cotangent; a frozen weight has no gradient node and costs no saved
//! activation. Cotangents that meet (tied weights, residuals, shared K/V) are added in the order they arrive, which
//! fixes the bits of the sum; a rule may do that itself where one op adds its term to what is there. Gradients leave as outputs `<initializer>.grad`, in the initializer's own layout.
//!
//! Gradients can be differentiated in turn, in a model that takes some itself. A row that only rules emit need not have a
//! rule for that: it is differentiated through its body (`through_body.rs`).

mod through_body;

use super::loss::Seed;
use crate::error::{Error, Result};
use crate::ir::op::{Domain, Grad, GradCx};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Builder, Graph, NodeId, Phase, Role, Same, SecondaryMap, ValueId};
use crate::ops;
use std::collections::BTreeMap;

/// Rows that were differentiated through their bodies, and how often.
pub type ThroughBodies = BTreeMap<&'static str, usize>;

/// Adds the backward of `seeds` with respect to `parameters`.
///
/// # Errors
/// An op on a path to a parameter that has no gradient; the error names it.
pub fn autodiff(
    graph: &mut Graph,
    seeds: &[Seed],
    parameters: &[ValueId],
) -> Result<ThroughBodies> {
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
        through_bodies: ThroughBodies::new(),
        bodies: Vec::new(),
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
        through_bodies,
        bodies,
        ..
    } = reverse;
    let mut outputs = b.graph.outputs().to_vec();
    for parameter in parameters {
        let wished = format!("{}.grad", b.graph.value(*parameter).name);
        if b.graph.has_value_name(&wished) {
            return Err(Error::model(
                "name",
                format!("the gradient is called `{wished}`, but the model uses that name"),
            ));
        }
        let gradient = finish(&mut b, *parameter, cotangents[*parameter], &outputs)?;
        b.graph.rename_value(gradient, &wished);
        outputs.push(gradient);
    }
    graph.set_outputs(outputs);
    through_body::prune(graph, &bodies, values);
    graph.phase = Phase::Training;
    Ok(through_bodies)
}

/// The way back through a graph.
struct Reverse<'a, 'g> {
    b: &'a mut Builder<'g>,
    /// Values that depend on a parameter, and are floating point.
    needs: SecondaryMap<ValueId, bool>,
    /// What readers of each value have given so far.
    cotangents: SecondaryMap<ValueId, Option<ValueId>>,
    through_bodies: ThroughBodies,
    /// The nodes of those bodies, as they were emitted.
    bodies: Vec<NodeId>,
}

impl Reverse<'_, '_> {
    /// Marks the results of `nodes` that depend on what is marked.
    fn reach(&mut self, nodes: &[NodeId]) {
        let graph = &self.b.graph;
        for id in nodes {
            let node = graph.node(*id);
            if node.ins.iter().flatten().any(|v| self.needs[*v])
                && !matches!(node.op.grad, Grad::Zero(_))
            {
                for out in &node.outs {
                    self.needs[*out] = graph.ty(*out).dtype.is_float();
                }
            }
        }
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
        let wants: Vec<bool> = node
            .ins
            .iter()
            .map(|v| v.is_some_and(|v| self.needs[v]))
            .collect();
        if dys.iter().all(Option::is_none) || !wants.contains(&true) {
            return Ok(());
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
        // What the rule did not add to stays.
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

    /// Adds `dx`, which the gradient of node `id` found, to what `x` was given so far.
    fn give(&mut self, id: NodeId, x: ValueId, dx: ValueId) -> Result<()> {
        check_type(self.b.graph, id, x, dx)?;
        self.cotangents[x] = Some(match self.cotangents[x] {
            None => dx,
            Some(earlier) => self.b.add(earlier, dx)?,
        });
        Ok(())
    }
}

fn missing(graph: &Graph, id: NodeId, why: &str) -> Box<Error> {
    let node = graph.node(id);
    let op = match node.op.domain {
        Domain::Opaque => node.attrs.opt_str("op_type").unwrap_or(node.op.name),
        _ => node.op.name,
    };
    Error::model("gradient", format!("{op} has no gradient here: {why}"))
        .at(graph.describe(id))
        .help("freeze the parameters before it with --freeze, or export the model without this op")
}

/// A gradient has the element type and shape of what it is the gradient of.
fn check_type(graph: &Graph, id: NodeId, x: ValueId, dx: ValueId) -> Result<()> {
    let (want, got) = (graph.ty(x), graph.ty(dx));
    let fits = want.dtype == got.dtype
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

/// The gradient of a parameter as a value of its own, fit to be a graph output.
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
        // Nothing the loss reads depends on it.
        None => b.filled_like(parameter, 0.0)?,
    };
    // Two parameters can share one cotangent (x + bias + bias2), and a cotangent can be an input.
    if outputs.contains(&gradient) || b.graph.def_node(gradient).is_none() {
        return b.emit(&ops::shape::IDENTITY, &[gradient], Attrs::new());
    }
    Ok(gradient)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn what_a_table_gets_from_a_tied_head_is_added_to_where_it_lies() {
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
