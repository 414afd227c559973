//! Updates of a parameter and its states that a device's library computes in one call.
//!
//! The nodes of such an update are those of the graph. The call is made at the node that updates the parameter, and the
//! nodes that update the states only say where these lie. So the gradient lives until the call. Which updates are fused
//! depends on the graph and not on its schedule: a plan changes no bit.

use crate::ir::{DType, Graph, NodeId, OpDef, ValueId};
use crate::ops::optimizer::{
    ADAM_MEAN, ADAM_SQUARE, ADAMW, APPLY, BETA, BETA1, BETA2, DAMPENING, EPS, GRAD_SCALE, MOMENTUM,
    MOMENTUM_FACTOR, SGD, WEIGHT_DECAY, decimal,
};
use rustc_hash::FxHashMap;

/// The formula of an update, which means what it means in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateFormula {
    /// Gradient descent; without a state if `momentum` is 0.
    Sgd {
        /// Factor of the old momentum buffer.
        momentum: f64,
        /// Factor of the parameter that is added to the gradient.
        weight_decay: f64,
        /// Nesterov's form.
        nesterov: bool,
    },
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay of the mean of gradients.
        beta1: f64,
        /// Decay of the mean of squared gradients.
        beta2: f64,
        /// Added to the root of the mean of squares.
        eps: f64,
        /// Share of the parameter, times the learning rate, by which it shrinks.
        weight_decay: f64,
    },
}

/// An update that is computed in one call.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedUpdate {
    /// The formula.
    pub formula: UpdateFormula,
    /// Position of the node that updates the parameter.
    pub at: usize,
    /// The parameter before the update.
    pub parameter: ValueId,
    /// The gradient: its last copy before the call.
    pub gradient: ValueId,
    /// Learning rate and, if the formula counts steps, the number of the step.
    pub scalars: Vec<ValueId>,
    /// Positions of the nodes that update the states.
    pub states: Vec<usize>,
}

/// Returns the updates whose formula a device's library has. Their sizes and layouts are not checked.
pub fn find(graph: &Graph) -> Vec<FusedUpdate> {
    let order = graph.order().iter().enumerate();
    let positions: FxHashMap<NodeId, usize> = order.clone().map(|(at, id)| (*id, at)).collect();
    let mut copies: FxHashMap<ValueId, Vec<(usize, ValueId)>> = FxHashMap::default();
    for (at, id) in order.clone() {
        for out in &graph.node(*id).outs {
            let origin = graph.origin(*out);
            if origin != *out {
                copies.entry(origin).or_default().push((at, *out));
            }
        }
    }
    let updates = order.filter(|(_, id)| graph.node(**id).op.is_update());
    let found = updates.filter_map(|(at, id)| fused(graph, &positions, at, *id));
    let latest = |mut update: FusedUpdate| {
        let copies = copies.get(&update.gradient).into_iter().flatten();
        let copy = copies.take_while(|(at, _)| *at < update.at).last();
        update.gradient = copy.map_or(update.gradient, |(_, copy)| *copy);
        update
    };
    found.map(latest).collect()
}

/// The fused update that ends with a node, if there is one.
fn fused(
    graph: &Graph,
    positions: &FxHashMap<NodeId, usize>,
    at: usize,
    id: NodeId,
) -> Option<FusedUpdate> {
    let node = graph.node(id);
    let parameter = node.operand(0)?;
    let (formula, states, scalar_slots) = match node.op {
        op if op == &ADAMW => adamw(graph, id)?,
        op if op == &SGD => sgd(graph, id, parameter)?,
        _ => return None,
    };
    let reads_gradient =
        states.is_empty() || matches!(formula, UpdateFormula::Sgd { nesterov: true, .. });
    let readers = states.iter().copied().chain(reads_gradient.then_some(id));
    // Each of the nodes may read a copy of its own.
    let mut gradients = readers.map(|r| graph.node(r).operand(1).map(|v| graph.origin(v)));
    let gradient = gradients.next()??;
    let is_one = gradients.all(|of| of == Some(gradient))
        && states
            .iter()
            .chain([&id])
            .all(|node| is_plain(graph, *node))
        && graph.ty(gradient).dtype == graph.ty(parameter).dtype;
    let scalars = scalar_slots.iter().map(|slot| node.operand(*slot));
    let scalars = scalars.collect::<Option<Vec<ValueId>>>()?;
    let is_read = !graph.value(node.outs[0]).uses().is_empty();
    let fits = is_one && !is_read && graph.ty(scalars[0]).dtype == DType::F32;
    fits.then(|| FusedUpdate {
        formula,
        at,
        parameter,
        gradient,
        scalars,
        states: states.iter().map(|state| positions[state]).collect(),
    })
}

/// Returns true if neither the gradient of an update is scaled nor the update left out at times.
fn is_plain(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    let slots = node.op.ins.iter().enumerate();
    let mut optional = slots.filter(|(_, slot)| matches!(slot.name, GRAD_SCALE | APPLY));
    optional.all(|(i, _)| node.operand(i).is_none())
}

type Parts = (UpdateFormula, Vec<NodeId>, &'static [usize]);

fn number(graph: &Graph, id: NodeId, name: &str) -> f64 {
    decimal(graph.node(id).attrs.float(name))
}

/// The node of op `op` that makes operand `slot` of `id`, if nothing else reads that but copies of `id`.
fn state(graph: &Graph, id: NodeId, slot: usize, op: &OpDef) -> Option<NodeId> {
    let value = graph.node(id).operand(slot)?;
    let maker = graph.def_node(value)?;
    let original = |id: NodeId| graph.node(id).recompute_of.unwrap_or(id);
    let mut uses = graph.value(value).uses().iter();
    let is_own = uses.all(|u| original(u.node) == original(id));
    (is_own && graph.node(maker).op == op).then_some(maker)
}

fn adamw(graph: &Graph, id: NodeId) -> Option<Parts> {
    let mean = state(graph, id, 1, &ADAM_MEAN)?;
    let square = state(graph, id, 2, &ADAM_SQUARE)?;
    let of = |name| number(graph, id, name);
    let (beta1, beta2) = (of(BETA1), of(BETA2));
    let formula = UpdateFormula::AdamW {
        beta1,
        beta2,
        eps: of(EPS),
        weight_decay: of(WEIGHT_DECAY),
    };
    let is_alike = number(graph, mean, BETA) == beta1 && number(graph, square, BETA) == beta2;
    is_alike.then_some((formula, vec![mean, square], &[3, 4]))
}

/// A step along the gradient with momentum or without, or along a buffer whose formula the library lacks.
fn sgd(graph: &Graph, id: NodeId, parameter: ValueId) -> Option<Parts> {
    let own_decay = number(graph, id, WEIGHT_DECAY);
    let nesterov = graph.node(id).operand(3).is_some();
    let buffer = state(graph, id, if nesterov { 3 } else { 1 }, &MOMENTUM);
    let with_momentum = buffer.and_then(|buffer| {
        let node = graph.node(buffer);
        let of = |name| number(graph, buffer, name);
        let weight_decay = node.operand(2).map_or(0.0, |_| of(WEIGHT_DECAY));
        let momentum = of(MOMENTUM_FACTOR);
        let is_alike = match nesterov {
            true => own_decay == weight_decay && number(graph, id, MOMENTUM_FACTOR) == momentum,
            false => own_decay == 0.0,
        };
        let is_sgd = is_alike
            && momentum != 0.0
            && of(DAMPENING) == 0.0
            && node.operand(2).is_none_or(|p| p == parameter);
        let formula = UpdateFormula::Sgd {
            momentum,
            weight_decay,
            nesterov,
        };
        is_sgd.then_some((formula, vec![buffer]))
    });
    let plain = UpdateFormula::Sgd {
        momentum: 0.0,
        weight_decay: own_decay,
        nesterov: false,
    };
    let without = (!nesterov).then_some((plain, Vec::new()));
    let (formula, states) = with_momentum.or(without)?;
    Some((formula, states, &[2]))
}
