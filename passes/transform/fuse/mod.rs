//! Puts one op in the place of several that compute the same: attention, norms, activations, rotary positions, and in 16
//! bits products with a bias.
//!
//! In and out: `Typed`, forward only. What is fused saves memory or time: a fused attention never makes its scores, a
//! fused norm or activation keeps one operand for its gradient where its parts keep several. Values stay the same but for
//! rounding. Patterns are told from dataflow, never from names; what a pattern would take away must be read by nobody
//! else. Every search is linear in the graph.
//!
//! A second run finds nothing: what is put in has no parts.

mod activation;
mod attention;
mod linear;
mod norm;
mod rotary;

use crate::analysis::matcher::Reading;
use crate::analysis::residual_stream::Flow;
use crate::error::Result;
use crate::ir::{Attrs, Builder, Graph, NodeId, Role, SecondaryMap, ValueId};
use crate::ops::concat::CONCAT;
use crate::ops::rule::sizes;
use crate::ops::shape::RESHAPE;
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::settle;
use crate::transform::simplify::simplify;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// How often each kind of op was put in, by a word for people.
pub type Fused = BTreeMap<&'static str, usize>;

/// One op that stands for several.
trait Pattern {
    /// The values it reads, so that what was put in for them meanwhile can take their place.
    fn operands(&mut self) -> Vec<&mut ValueId>;
    /// What it is, for people.
    fn word(&self) -> &'static str;
    /// Emits it; the value that takes the old one's place.
    fn build(self, b: &mut Builder) -> Result<ValueId>;
}

/// What one search found: the value to compute in another way, and how.
struct Found<P> {
    output: ValueId,
    what: P,
}

/// Fuses what can be fused; returns what it put in.
///
/// # Errors
/// See [`infer`].
pub fn fuse(graph: &mut Graph) -> Result<Fused> {
    let flow = Flow::new(graph)?;
    let mut reading = Reading::new(graph, &flow);
    let norms = norm::find(&mut reading);
    let activations = activation::find(&mut reading);
    let rotaries = rotary::find(&mut reading);
    let attentions = attention::find(&mut reading);
    let linears = linear::find(&reading);
    let mut fused = Fused::new();
    let none = norms.is_empty() && activations.is_empty() && rotaries.is_empty();
    if none && attentions.is_empty() && linears.is_empty() {
        return Ok(fused);
    }
    // Constants of the parts; what is trained stays whatever becomes of its readers.
    let constants: Vec<ValueId> = graph
        .inits()
        .filter(|(id, v)| !v.uses().is_empty() && !flow.active[*id])
        .map(|(id, _)| id)
        .collect();
    let mut splice = Splice::new(graph)?;
    for found in norms {
        splice.replace(&mut fused, found)?;
    }
    for found in activations {
        splice.replace(&mut fused, found)?;
    }
    for found in rotaries {
        splice.replace(&mut fused, found)?;
    }
    for found in attentions {
        splice.replace(&mut fused, found)?;
    }
    for found in linears {
        splice.replace(&mut fused, found)?;
    }
    splice.finish()?;
    dce(graph);
    // New nodes may ask for shapes of values that are no longer made; and sizes may be written in another way.
    simplify(graph)?;
    for id in constants {
        let unread = |g: &Graph| g.value(id).uses().is_empty() && !g.is_output(id);
        if graph.contains_value(id) && unread(graph) {
            graph.remove_source(id);
        }
    }
    Ok(fused)
}

/// The last `own` axes of a value behind the first `lead` ones of another.
fn with_lead(
    b: &mut Builder,
    x: ValueId,
    like: ValueId,
    lead: usize,
    own: usize,
) -> Result<ValueId> {
    let rank = b.rank(x);
    let parts = [sizes(b, like, 0..lead)?, sizes(b, x, rank - own..rank)?];
    let target = b.emit(&CONCAT, &parts, Attrs::new().with("axis", 0))?;
    b.emit(&RESHAPE, &[x, target], Attrs::new().with("allowzero", 1))
}

/// Puts nodes in the places of others.
struct Splice<'g> {
    b: Builder<'g>,
    /// New nodes, by the node in whose place they stand.
    placed: SecondaryMap<NodeId, Vec<NodeId>>,
    /// What took the place of a value.
    now: FxHashMap<ValueId, ValueId>,
    first_new: usize,
}

impl<'g> Splice<'g> {
    fn new(graph: &'g mut Graph) -> Result<Splice<'g>> {
        let contents = infer(graph)?;
        let first_new = graph.order().len();
        let placed = SecondaryMap::new(graph.node_bound(), Vec::new());
        Ok(Splice {
            b: Builder::resume(graph, contents),
            placed,
            now: FxHashMap::default(),
            first_new,
        })
    }

    /// Builds another computation of a value and lets everyone read that. It has the value's name, place and origin.
    fn replace<P: Pattern>(&mut self, fused: &mut Fused, mut found: Found<P>) -> Result<()> {
        let old = found.output;
        for operand in found.what.operands() {
            if let Some(new) = self.now.get(operand) {
                *operand = *new;
            }
        }
        let Some(anchor) = self.b.graph.def_node(old) else {
            return Ok(());
        };
        let node = self.b.graph.node(anchor);
        self.b.loc = node.loc.clone();
        self.b.role = Role::Forward;
        self.b.prefix = node.name.clone();
        let before = self.b.graph.order().len();
        let word = found.what.word();
        let new = found.what.build(&mut self.b)?;
        let made = self.b.graph.order()[before..].to_vec();
        self.placed[anchor].extend(made);
        let name = self.b.graph.value(old).name.clone();
        self.b.graph.rename_value(old, &format!("{name}/parts"));
        self.b.graph.rename_value(new, &name);
        self.b.graph.replace_uses(old, new);
        self.now.insert(old, new);
        *fused.entry(word).or_insert(0) += 1;
        Ok(())
    }

    /// Moves new nodes to their places, operands first.
    fn finish(self) -> Result<()> {
        let graph = self.b.graph;
        let old = graph.order()[..self.first_new].to_vec();
        let mut order = Vec::with_capacity(graph.order().len());
        let mut done: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        for id in old {
            for new in &self.placed[id] {
                settle(graph, *new, &mut done, &mut order)?;
            }
            settle(graph, id, &mut done, &mut order)?;
        }
        graph.set_order(order);
        Ok(())
    }
}
