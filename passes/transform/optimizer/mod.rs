//! Appends the optimizer: the value of each parameter, and of the state kept for it, in the next step.
//!
//! In and out: `Training`. Gradients are found by their names (`<initializer>.grad`). A parameter that the loss does not
//! reach is left alone, as PyTorch leaves alone a parameter without a gradient. New inputs: `lr` (float32 scalar), `step`
//! (int64 scalar, from 1) where the formula counts steps, and the states of each parameter (`<initializer>.momentum`, …;
//! [`crate::analysis::gradients::start`] says how they start). New outputs: `<initializer>.updated` and `<state>.updated`.
//!
//! An update is a function of the old tensor, so no order of nodes makes it wrong. Where it is the last reader, it is
//! written over its operand and takes no memory (`analysis::memory`). The order is therefore chosen so that it is the
//! last reader. Appended updates run at the end, and gradients stay outputs. A fused update runs as soon as its gradient
//! is complete and its parameter was read for the last time. Its gradient is no output, so gradients never all live at
//! once. A gradient that is accumulated is no output either: it is added up as soon as it is complete.
//!
//! Where ranks share the step and each keeps a slice of the states ([`Shard`]), a rank updates its own slice of a parameter,
//! and the last node of the update gathers the slices of all. Gradients of which only slices are kept are no outputs. A part of
//! a parameter that ranks share otherwise ([`OwnPart`]) is updated as a parameter of that size.
//!
//! - [`options`]: what updates, and how.
//! - [`formulas`]: the nodes of an update, by optimizer; [`adafactor`] and [`muon`] by themselves.
//! - [`scaling`]: what is common to all updates of a step: factor of the gradient, and whether it applies.

mod adafactor;
mod formulas;
mod muon;
mod names;
mod options;
mod scaling;

pub use names::{APPLY, LOSS_SCALE, LR, RESTART, SHARD, STATES, UPDATED};
pub use options::{Adafactor, Muon, Optimizer, UpdateOptions};
pub use scaling::scale_loss;

use self::formulas::{Own, emit, prepare};
use self::names::{ACCUMULATED, MASTER, emit_update, fail, input, named};
use self::scaling::{Scaling, Sums};
use super::dce::dce;
use super::rng_streams::seed_input;
use crate::analysis::gradients::{STEP, is_zero_gradient};
use crate::analysis::params::{self, check_pattern};
use crate::error::Result;
use crate::glob;
use crate::ir::typing::Contents;
use crate::ir::{Attrs, DType, Def, Graph, NodeId, OpDef, Role, SecondaryMap, Tensor, Ty, ValueId};
use crate::ops::collective::{
    ALL_GATHER, DATA_PARALLEL, GATHER_SLICES, OWN_SLICE, OwnPart, RANKS, REDUCE_SCATTER,
    TENSOR_PARALLEL, of_group, own_parts,
};
use crate::ops::optimizer::{ADD_GRADIENT, REPLACE};
use crate::ops::random::{STOCHASTIC_ROUND, stream};
use crate::ops::rule::compute_type;
use crate::ops::{Builder, EmitExt};
use crate::transform::collectives::{Mesh, Shard};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// What the pass did.
#[derive(Clone, Debug, Default)]
pub struct Updates {
    /// Number of parameters that are updated.
    pub parameters: usize,
    /// Names of parameters that the loss does not reach: they stay as they are.
    pub unreached: Vec<String>,
}

/// The update of one parameter.
struct Update {
    parameter: ValueId,
    gradient: ValueId,
    /// Position of the node that makes the gradient.
    made_at: usize,
    /// Position of the last node that reads the parameter or makes the gradient.
    ready_after: usize,
}

/// The inputs of one parameter's update.
struct States {
    own: Own,
    accumulated: Option<ValueId>,
    master: Option<ValueId>,
}

/// The new nodes, in order, each with the position after which it runs.
struct Placed {
    first: usize,
    after: Vec<usize>,
}

impl Placed {
    /// Places the nodes that were emitted since the last call.
    fn place(&mut self, graph: &Graph, after: usize) {
        self.after.resize(graph.order().len() - self.first, after);
    }

    /// Returns the order with each new node at its place.
    fn order(&self, graph: &Graph) -> Vec<NodeId> {
        let (old, new) = graph.order().split_at(self.first);
        let mut new: Vec<(usize, NodeId)> = self
            .after
            .iter()
            .copied()
            .zip(new.iter().copied())
            .collect();
        new.sort_by_key(|(after, _)| *after);
        let mut new = new.into_iter().peekable();
        let mut order = Vec::with_capacity(graph.order().len());
        for (position, id) in old.iter().enumerate() {
            order.push(*id);
            while let Some((_, id)) = new.next_if(|(after, _)| *after <= position) {
                order.push(id);
            }
        }
        order.extend(new.map(|(_, id)| id));
        order
    }
}

/// The slices that ranks keep.
#[derive(Clone, Copy)]
struct Slices {
    ranks: u32,
    /// Gradients, too, once they are summed.
    of_gradients: bool,
}

impl Slices {
    /// Returns the slices that a mesh asks for, if it does.
    ///
    /// # Errors
    /// An optimizer whose update of an element reads others.
    fn of(mesh: Option<&Mesh>, options: &UpdateOptions) -> Result<Option<Slices>> {
        let Some(mesh) = mesh.filter(|mesh| mesh.shard != Shard::None && mesh.dp > 1) else {
            return Ok(None);
        };
        if let Some(why) = reads_others(options) {
            let shard = mesh.shard;
            return Err(
                fail(format!("{why}, so no rank can keep a slice of it")).help(format!(
                    "leave --shard {shard} out: every rank then keeps all states"
                )),
            );
        }
        Ok(Some(Slices {
            ranks: mesh.dp,
            of_gradients: mesh.shard >= Shard::Grads,
        }))
    }

    /// Returns the type of a slice.
    fn ty(self, whole: &Ty) -> Ty {
        let ranks = i64::from(self.ranks).into();
        Ty::new(whole.dtype, [whole.elements().ceil_div(&ranks)])
    }

    fn emit(self, b: &mut Builder, op: &'static OpDef, x: ValueId) -> Result<ValueId> {
        b.emit(op, &[x], of_group(DATA_PARALLEL, self.ranks))
    }
}

/// Returns why the update of an element reads others, if it does.
fn reads_others(options: &UpdateOptions) -> Option<&'static str> {
    match options.optimizer {
        Some(Optimizer::Adafactor(_) | Optimizer::Muon(_)) => {
            Some("the optimizer reads whole rows or matrices of a parameter")
        }
        Some(Optimizer::AdamW {
            eight_bits: true, ..
        }) => Some(
            "the states of the optimizer are codes of blocks of a parameter, and a share of it has other blocks",
        ),
        _ if options.stochastic_rounding => Some("a parameter is rounded as a whole"),
        _ => None,
    }
}

/// What a rank holds of a parameter, or of a state that has an element for each of its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The name of the whole: of the parameter, or of the state itself.
    pub whole: String,
    /// The parameter.
    pub parameter: ValueId,
    /// The part of it that the rank has; `None` where it is not divided.
    pub part: Option<OwnPart>,
    /// How many ranks each keep a slice of that; 1 where this one has all of it.
    pub slices: i64,
}

/// Returns, by name, what the inputs of a graph hold of parameters and of states.
pub fn held_by_name(graph: &Graph) -> BTreeMap<String, Held> {
    let mut slices = 1;
    let name = |id: ValueId| graph.value(id).name.clone();
    let mut all = BTreeMap::new();
    for (_, node) in graph.nodes() {
        if node.op == &GATHER_SLICES || node.op == &ALL_GATHER {
            slices = node.attrs.int(RANKS);
        }
        let (Some(parameter), Some(shard)) = (node.operand(0), node.operand(1)) else {
            continue;
        };
        if node.op == &ALL_GATHER {
            let held = Held {
                whole: name(parameter),
                parameter,
                part: None,
                slices,
            };
            all.insert(name(shard), held);
        }
    }
    let mut parts = BTreeMap::new();
    for part in own_parts(graph) {
        let held = Held {
            whole: name(part.parameter),
            parameter: part.parameter,
            slices: part.slices,
            part: Some(part.clone()),
        };
        all.insert(name(part.input), held);
        parts.insert(part.parameter, part);
    }
    for id in graph.inputs() {
        let state = name(*id);
        let parameter = STATES.iter().find_map(|end| state.strip_suffix(end));
        let parameter = parameter.and_then(|name| graph.find_value(name));
        let Some(parameter) = parameter.filter(|id| matches!(graph.value(*id).def, Def::Init(_)))
        else {
            continue;
        };
        let part = parts.get(&parameter).cloned();
        let of = match &part {
            Some(part) => part.ty(graph),
            None => graph.ty(parameter).clone(),
        };
        let dims = &graph.ty(*id).dims;
        let is_slice = slices > 1 && dims[..] == [of.elements().ceil_div(&slices.into())];
        if is_slice || *dims == of.dims {
            let held = Held {
                whole: state.clone(),
                parameter,
                part,
                slices: if is_slice { slices } else { 1 },
            };
            all.insert(state, held);
        }
    }
    all
}

/// Adds an update for each parameter that has a gradient, as `options` say; nothing without an optimizer. Ranks of a mesh
/// may keep slices of the states.
///
/// # Errors
/// Options that exclude each other or match nothing; a graph that already has updates, or no gradient of an initializer; a
/// name that is taken.
pub fn add_updates(
    graph: &mut Graph,
    options: &UpdateOptions,
    mesh: Option<&Mesh>,
) -> Result<Option<Updates>> {
    options.check()?;
    let Some(optimizer) = options.optimizer else {
        return Ok(None);
    };
    if graph.nodes().any(|(_, node)| node.op.is_update()) {
        return Err(fail("the graph updates its parameters already".into())
            .help("leave --optimizer out: the updates that are there stay"));
    }
    let parts = own_parts(graph).into_iter();
    let parts: BTreeMap<ValueId, OwnPart> = parts.map(|part| (part.input, part)).collect();
    let gradients = gradients(graph, &parts);
    let mut of_parts = gradients.iter().filter_map(|(own, _)| parts.get(own));
    if let (Some(why), Some(part)) = (reads_others(options), of_parts.next()) {
        return Err(fail(format!("{why}, so no rank can have a part of it"))
            .at(format!("`{}`", graph.value(part.parameter).name))
            .help("leave tp out of --mesh, or choose another optimizer"));
    }
    if gradients.is_empty() {
        return Err(fail("no output is the gradient of an initializer".into())
            .expected("<initializer>.grad"));
    }
    let (reached, unreached): (Vec<_>, Vec<_>) = gradients
        .iter()
        .copied()
        .partition(|(_, gradient)| !is_zero_gradient(graph, *gradient));
    let name = |(parameter, _): &(ValueId, ValueId)| graph.value(*parameter).name.clone();
    let done = Updates {
        parameters: reached.len(),
        unreached: unreached.iter().map(name).collect(),
    };
    let slices = Slices::of(mesh, options)?;
    let gradient_slices = slices.filter(|slices| slices.of_gradients);
    let updates = in_order(graph, &reached);
    let mut outputs = graph.outputs().to_vec();
    let keeps_gradients =
        !options.fuse && options.accumulate.is_none() && gradient_slices.is_none();
    outputs.retain(|v| keeps_gradients || !gradients.iter().any(|(_, gradient)| gradient == v));
    let lr = input(graph, LR, Ty::new(DType::F32, []))?;
    let step = match optimizer.counts_steps() {
        true => Some(input(graph, STEP, Ty::new(DType::I64, []))?),
        false => None,
    };
    let scaling = Scaling::inputs(graph, options)?;
    let rounds = |graph: &Graph, (parameter, _): &(ValueId, ValueId)| {
        options.stochastic_rounding && graph.ty(*parameter).dtype == DType::BF16
    };
    let seed = match reached.iter().any(|pair| rounds(graph, pair)) {
        true => Some(seed_input(graph)?),
        false => None,
    };
    // States and outputs follow the order of the gradients, updates the order in which they can run.
    let mut states = BTreeMap::new();
    for ((parameter, _), decays) in reached.iter().zip(decays(graph, &reached, options)?) {
        let is_for_muon = muon::takes(graph, *parameter);
        let own = optimizer.of(graph.ty(*parameter), is_for_muon, decays);
        states.insert(
            *parameter,
            add_states(graph, *parameter, (options, slices), &parts, own)?,
        );
    }
    let mut placed = Placed {
        first: graph.order().len(),
        after: Vec::new(),
    };
    let end = placed.first;
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    b.role = Role::Backward;
    let mut totals = BTreeMap::new();
    for update in &updates {
        let mut total = update.gradient;
        if let Some(slices) = gradient_slices {
            b.prefix = b.graph.value(update.parameter).name.clone();
            total = slices.emit(&mut b, &REDUCE_SCATTER, total)?;
            placed.place(b.graph, update.made_at);
        }
        if let (Some(sum), Some(restart)) = (states[&update.parameter].accumulated, scaling.restart)
        {
            b.prefix = b.graph.value(update.parameter).name.clone();
            let ins = vec![Some(sum), Some(total), Some(restart)];
            total = emit_update(&mut b, &ADD_GRADIENT, ins, Attrs::new(), sum)?;
            placed.place(b.graph, update.made_at);
        }
        totals.insert(update.parameter, total);
    }
    b.prefix = "gradients".into();
    let all: Vec<ValueId> = reached
        .iter()
        .map(|(parameter, _)| totals[parameter])
        .collect();
    let of_parts = reached
        .iter()
        .filter(|(parameter, _)| parts.contains_key(parameter));
    let sums = Sums {
        slices: gradient_slices.map(|s| of_group(DATA_PARALLEL, s.ranks)),
        parts: parts
            .values()
            .next()
            .map(|part| of_group(TENSOR_PARALLEL, part.ranks)),
        of_parts: of_parts.map(|(parameter, _)| totals[parameter]).collect(),
    };
    let shared = scaling.emit(&mut b, (options, &sums), &all, (lr, step))?;
    let prepared = prepare(&mut b, &optimizer, &shared)?;
    // Factors of fused updates depend on inputs alone.
    placed.place(b.graph, if options.fuse { 0 } else { end });
    outputs.extend(shared.outputs());
    let mut made: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    for update in &updates {
        b.prefix = b.graph.value(update.parameter).name.clone();
        b.loc = Default::default();
        let of = &states[&update.parameter];
        let seed = seed.filter(|_| rounds(b.graph, &(update.parameter, update.gradient)));
        let mut p = match seed {
            Some(_) => b.cast(update.parameter, DType::F32)?,
            None => of.master.unwrap_or(update.parameter),
        };
        let total = totals[&update.parameter];
        let mut gradient = total;
        if let Some(slices) = slices {
            // A master is a slice already.
            if of.master.is_none() {
                let own = format!("{}.slice", b.prefix);
                p = slices.emit(&mut b, &OWN_SLICE, p)?;
                p = named(&mut b, p, &own)?;
            }
            if !slices.of_gradients {
                gradient = slices.emit(&mut b, &OWN_SLICE, total)?;
            }
        }
        let mut results = emit(&mut b, &of.own, (p, gradient), (&shared, &prepared))?;
        let whole = match slices {
            Some(slices) => Some((&GATHER_SLICES, of_group(DATA_PARALLEL, slices.ranks))),
            None => of.master.map(|_| (&REPLACE, Attrs::new())),
        };
        if let Some((op, attrs)) = whole {
            let ins = vec![Some(update.parameter), Some(results[0])];
            let whole = emit_update(&mut b, op, ins, attrs, update.parameter)?;
            match of.master {
                Some(_) => results.insert(0, whole),
                None => results[0] = whole,
            }
        }
        if let Some(seed) = seed {
            let name = format!("{}.rounding", b.prefix);
            let number = b.constant(&name, Tensor::int(stream(&name)));
            let ins = [update.parameter, results[0], seed, number].map(Some);
            let (old, attrs) = (update.parameter, Attrs::new());
            results[0] = emit_update(&mut b, &STOCHASTIC_ROUND, ins.into(), attrs, old)?;
        }
        results.extend(of.accumulated.map(|_| total));
        made.insert(update.parameter, results);
        placed.place(
            b.graph,
            if options.fuse {
                update.ready_after
            } else {
                end
            },
        );
    }
    outputs.extend(reached.iter().flat_map(|(parameter, _)| &made[parameter]));
    if let (Some(restart), Some(apply)) = (scaling.restart, scaling.apply) {
        b.prefix = RESTART.into();
        let ins = vec![Some(restart), Some(apply)];
        outputs.push(emit_update(&mut b, &REPLACE, ins, Attrs::new(), restart)?);
        placed.place(b.graph, end);
    }
    graph.set_outputs(outputs);
    graph.set_order(placed.order(graph));
    if !keeps_gradients {
        dce(graph);
    }
    Ok(Some(done))
}

/// Returns for each parameter whether its weight decays.
fn decays(
    graph: &Graph,
    reached: &[(ValueId, ValueId)],
    options: &UpdateOptions,
) -> Result<Vec<bool>> {
    let parameters = reached.iter().map(|(parameter, _)| *parameter);
    for pattern in &options.no_decay {
        check_pattern(graph, parameters.clone(), pattern, "--no-decay")?;
    }
    let stays = |parameter: ValueId| {
        let mut patterns = options.no_decay.iter();
        let is_named = patterns.any(|pattern| {
            params::names(graph, parameter).any(|name| glob::matches(pattern, name))
        });
        is_named || (options.no_decay_vectors && graph.ty(parameter).rank() <= 1)
    };
    Ok(parameters.map(|parameter| !stays(parameter)).collect())
}

/// Adds the inputs that are the states of a parameter.
fn add_states(
    graph: &mut Graph,
    parameter: ValueId,
    (options, slices): (&UpdateOptions, Option<Slices>),
    parts: &BTreeMap<ValueId, OwnPart>,
    optimizer: Optimizer,
) -> Result<States> {
    let origin = graph.origins.get(&parameter).cloned();
    let ty = graph.ty(parameter).clone();
    let wide = Ty {
        dtype: compute_type(ty.dtype),
        ..ty.clone()
    };
    // The states of a part bear the names of those of the whole, which checkpoints have.
    let whole = parts.get(&parameter).map_or(parameter, |p| p.parameter);
    let name = graph.value(whole).name.clone();
    let mut state = |end: &str, ty: &Ty| input(graph, &format!("{name}{end}"), ty.clone());
    let has_master = options.master_weights && wide != ty;
    let is_wide = has_master || (options.stochastic_rounding && ty.dtype == DType::BF16);
    let mut own_ty = if is_wide { wide.clone() } else { ty };
    let mut sum_ty = wide;
    if let Some(slices) = slices {
        own_ty = slices.ty(&own_ty);
        if slices.of_gradients {
            sum_ty = slices.ty(&sum_ty);
        }
    }
    let states = optimizer.states(&own_ty).into_iter();
    let states = states.map(|(end, ty)| state(end, &ty));
    let own = Own {
        optimizer,
        states: states.collect::<Result<_>>()?,
        is_transposed: origin.is_some_and(|o| o.transposed),
    };
    let accumulates = options.accumulate.is_some();
    Ok(States {
        own,
        master: has_master.then(|| state(MASTER, &own_ty)).transpose()?,
        accumulated: accumulates
            .then(|| state(ACCUMULATED, &sum_ty))
            .transpose()?,
    })
}

/// Returns initializers and parts of them, with their gradients among the outputs, in output order.
fn gradients(graph: &Graph, parts: &BTreeMap<ValueId, OwnPart>) -> Vec<(ValueId, ValueId)> {
    let own = parts.keys().map(|id| (graph.value(*id).name.as_str(), *id));
    let by_name: FxHashMap<&str, ValueId> = graph
        .inits()
        .map(|(id, v)| (v.name.as_str(), id))
        .chain(own)
        .collect();
    let parameter = |gradient: &ValueId| {
        let name = graph.value(*gradient).name.strip_suffix(".grad")?;
        let parameter = *by_name.get(name)?;
        (graph.ty(parameter) == graph.ty(*gradient)).then_some((parameter, *gradient))
    };
    graph.outputs().iter().filter_map(parameter).collect()
}

/// Returns the updates in an order in which they can run. A view of a parameter counts as the parameter: what reads the
/// result of a layout op reads the operand.
fn in_order(graph: &Graph, gradients: &[(ValueId, ValueId)]) -> Vec<Update> {
    let mut shows: SecondaryMap<ValueId, Option<ValueId>> =
        SecondaryMap::new(graph.value_bound(), None);
    let mut last: SecondaryMap<ValueId, usize> = SecondaryMap::new(graph.value_bound(), 0);
    for (parameter, _) in gradients {
        shows[*parameter] = Some(*parameter);
    }
    for (position, id) in graph.order().iter().enumerate() {
        let node = graph.node(*id);
        for parameter in node.operands().filter_map(|v| shows[v]) {
            last[parameter] = position;
        }
        let viewed = node.operand(0).filter(|_| node.op.is_layout());
        for out in &node.outs {
            last[*out] = position;
            shows[*out] = viewed.and_then(|v| shows[v]);
        }
    }
    let update = |(parameter, gradient): &(ValueId, ValueId)| Update {
        parameter: *parameter,
        gradient: *gradient,
        made_at: last[*gradient],
        ready_after: last[*parameter].max(last[*gradient]),
    };
    let mut updates: Vec<Update> = gradients.iter().map(update).collect();
    updates.sort_by_key(|update| update.ready_after);
    updates
}
