//! Appends the optimizer: what each parameter, and the state kept for it, becomes in the next step.
//!
//! In and out: `Training`. Gradients are found by their names (`<initializer>.grad`). A parameter that the loss does not
//! reach is left alone, as PyTorch leaves alone what has no gradient. New inputs: `lr` (float32 scalar), `step` (int64
//! scalar, from 1) where the formula counts steps, and the state of each parameter, of its type (`<initializer>.momentum`,
//! `.exp_avg`, `.exp_avg_sq`; all zeros before the first step). New outputs: `<initializer>.updated` and
//! `<state>.updated`.
//!
//! An update is a function of the old tensor, so no order of nodes makes it wrong; where it is the last reader it is
//! written over what it reads and takes no memory (`analysis::memory`). The order is therefore chosen so that it is the
//! last. Appended, all updates run at the end and gradients stay outputs. Fused, each runs as soon as its gradient is
//! complete and its parameter was read for the last time, and gradients are no outputs: they never all live at once.

use super::dce::dce;
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Builder, DType, Def, Graph, NodeId, Role, SecondaryMap, Ty, ValueId};
use crate::ops::optimizer::{
    ADAM_MEAN, ADAM_SQUARE, ADAMW, BETA, BETA1, BETA2, DAMPENING, EPS, MOMENTUM, MOMENTUM_FACTOR,
    SGD, WEIGHT_DECAY, decimal,
};
use crate::ops::shape::EXPAND;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::fmt;

/// The input that is the learning rate, and the one that counts steps.
pub const LR: &str = "lr";
pub const STEP: &str = "step";
/// How the name of what an update makes ends.
pub const UPDATED: &str = ".updated";
/// How names of states end.
pub const STATES: [&str; 3] = [".momentum", ".exp_avg", ".exp_avg_sq"];

/// An optimizer and its constants; they mean what they mean in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    Sgd {
        momentum: f32,
        dampening: f32,
        weight_decay: f32,
        nesterov: bool,
    },
    AdamW {
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
    },
}

const SGD_SETTINGS: &str = "momentum, dampening, weight_decay, nesterov";
const ADAMW_SETTINGS: &str = "beta1, beta2, eps, weight_decay";

impl Optimizer {
    /// Reads `sgd`, `adamw` or either with settings: `adamw:beta1=0.9,eps=1e-8`. What is not set has PyTorch's default.
    ///
    /// # Errors
    /// An optimizer or setting that there is not, one that is set twice, a number out of its range or of more digits
    /// than float32 holds.
    pub fn parse(text: &str) -> Result<Optimizer> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let mut optimizer = match name {
            "sgd" => Optimizer::Sgd {
                momentum: 0.0,
                dampening: 0.0,
                weight_decay: 0.0,
                nesterov: false,
            },
            "adamw" => Optimizer::AdamW {
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.01,
            },
            other => {
                return Err(fail(format!("there is no optimizer `{other}`"))
                    .expected("sgd or adamw, perhaps with settings: sgd:momentum=0.9"));
            }
        };
        let mut seen: Vec<&str> = Vec::new();
        for setting in settings.split(',').filter(|_| text.contains(':')) {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            if seen.contains(&key) {
                return Err(fail(format!("`{key}` is set twice")));
            }
            seen.push(key);
            optimizer.set(key, value)?;
        }
        if let Optimizer::Sgd {
            momentum,
            dampening,
            nesterov: true,
            ..
        } = optimizer
            && (momentum == 0.0 || dampening != 0.0)
        {
            return Err(fail("nesterov needs a momentum, and no dampening".into()));
        }
        Ok(optimizer)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let (place, below_one) = match (self, key) {
            (Optimizer::Sgd { nesterov, .. }, "nesterov") => {
                *nesterov = match value {
                    "true" => true,
                    "false" => false,
                    other => {
                        return Err(fail(format!("`nesterov` cannot be `{other}`"))
                            .expected("true or false"));
                    }
                };
                return Ok(());
            }
            (Optimizer::Sgd { momentum, .. }, "momentum") => (momentum, false),
            (Optimizer::Sgd { dampening, .. }, "dampening") => (dampening, false),
            (Optimizer::Sgd { weight_decay, .. }, "weight_decay") => (weight_decay, false),
            (Optimizer::AdamW { beta1, .. }, "beta1") => (beta1, true),
            (Optimizer::AdamW { beta2, .. }, "beta2") => (beta2, true),
            (Optimizer::AdamW { eps, .. }, "eps") => (eps, false),
            (Optimizer::AdamW { weight_decay, .. }, "weight_decay") => (weight_decay, false),
            (optimizer, _) => {
                let known = match optimizer {
                    Optimizer::Sgd { .. } => SGD_SETTINGS,
                    Optimizer::AdamW { .. } => ADAMW_SETTINGS,
                };
                return Err(fail(format!("there is no setting `{key}`")).expected(known));
            }
        };
        *place = number(key, value, below_one)?;
        Ok(())
    }

    /// How the names of the states end that it keeps for a parameter.
    fn states(&self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { momentum: 0.0, .. } => &[],
            Optimizer::Sgd { .. } => &STATES[..1],
            Optimizer::AdamW { .. } => &STATES[1..],
        }
    }

    /// Whether it counts steps.
    fn counts_steps(&self) -> bool {
        match self {
            Optimizer::Sgd {
                momentum,
                dampening,
                ..
            } => *momentum != 0.0 && *dampening != 0.0,
            Optimizer::AdamW { .. } => true,
        }
    }
}

impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Optimizer::Sgd {
                momentum,
                dampening,
                weight_decay,
                nesterov,
            } => write!(
                f,
                "sgd:momentum={momentum},dampening={dampening},weight_decay={weight_decay},nesterov={nesterov}"
            ),
            Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => write!(
                f,
                "adamw:beta1={beta1},beta2={beta2},eps={eps:e},weight_decay={weight_decay}"
            ),
        }
    }
}

fn fail(text: String) -> Box<Error> {
    Error::usage("optimizer", text)
}

fn number(key: &str, text: &str, below_one: bool) -> Result<f32> {
    let expected = match below_one {
        true => "a number from 0 to below 1",
        false => "a number, 0 or more",
    };
    let wrong = |what: String| Err(fail(what).expected(expected));
    let Ok(wide) = text.parse::<f64>() else {
        return wrong(format!("`{key}` cannot be `{text}`"));
    };
    let narrow = wide as f32;
    if !narrow.is_finite() || wide < 0.0 || (below_one && narrow >= 1.0) {
        return wrong(format!("`{key}` cannot be {text}"));
    }
    if decimal(narrow) != wide {
        return wrong(format!(
            "`{key}` has more digits than float32 holds: {text}"
        ));
    }
    Ok(narrow)
}

/// What the pass did.
#[derive(Clone, Debug, Default)]
pub struct Updates {
    /// How many parameters are updated.
    pub parameters: usize,
    /// Parameters that the loss does not reach, by name: they stay as they are.
    pub unreached: Vec<String>,
}

/// What the updates of one parameter are made of.
struct Update {
    parameter: ValueId,
    gradient: ValueId,
    /// The position of the last node that reads the parameter or makes the gradient.
    after: usize,
}

/// Adds an update for each parameter that has a gradient; with `fuse` as early as it can be.
///
/// # Errors
/// A graph that has updates already, or no gradient of an initializer; a name that is taken.
pub fn add_updates(graph: &mut Graph, optimizer: &Optimizer, fuse: bool) -> Result<Updates> {
    if graph.nodes().any(|(_, node)| node.op.is_update()) {
        return Err(fail("the graph updates its parameters already".into())
            .help("leave --optimizer out: the updates that are there stay"));
    }
    let gradients = gradients(graph);
    if gradients.is_empty() {
        return Err(fail("no output is the gradient of an initializer".into())
            .expected("<initializer>.grad"));
    }
    let mut done = Updates::default();
    let (reached, unreached): (Vec<_>, Vec<_>) = gradients
        .iter()
        .copied()
        .partition(|(_, gradient)| !is_nothing(graph, *gradient));
    done.parameters = reached.len();
    let name = |(parameter, _): &(ValueId, ValueId)| graph.value(*parameter).name.clone();
    done.unreached = unreached.iter().map(name).collect();
    let updates = placed(graph, &reached);
    let first = graph.order().len();
    let mut outputs = graph.outputs().to_vec();
    if fuse {
        outputs.retain(|v| !gradients.iter().any(|(_, gradient)| gradient == v));
    }
    let lr = input(graph, LR, Ty::new(DType::F32, []))?;
    let step = match optimizer.counts_steps() {
        true => Some(input(graph, STEP, Ty::new(DType::I64, []))?),
        false => None,
    };
    // States and outputs are in the order of the gradients, updates in that in which they can run.
    let mut states: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    for (parameter, _) in &reached {
        let own = optimizer.states().iter();
        let own = own.map(|end| state(graph, *parameter, end));
        states.insert(*parameter, own.collect::<Result<_>>()?);
    }
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    b.role = Role::Backward;
    // Of each new node, in order: the position after which it may run.
    let mut after = Vec::new();
    let mut made: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    for update in &updates {
        b.prefix = b.graph.value(update.parameter).name.clone();
        b.loc = Default::default();
        let of = &states[&update.parameter];
        let results = emit(&mut b, optimizer, update, of, (lr, step))?;
        made.insert(update.parameter, results);
        after.resize(b.graph.order().len() - first, update.after);
    }
    outputs.extend(reached.iter().flat_map(|(parameter, _)| &made[parameter]));
    graph.set_outputs(outputs);
    if fuse {
        let mut order = Vec::with_capacity(graph.order().len());
        let (old, new) = graph.order().split_at(first);
        let mut new = new.iter().zip(after).peekable();
        for (position, id) in old.iter().enumerate() {
            order.push(*id);
            while let Some((id, _)) = new.next_if(|(_, after)| *after == position) {
                order.push(*id);
            }
        }
        order.extend(new.map(|(id, _)| *id));
        graph.set_order(order);
        dce(graph);
    }
    Ok(done)
}

/// Initializers and their gradients among the outputs, in the order of these.
fn gradients(graph: &Graph) -> Vec<(ValueId, ValueId)> {
    let by_name: FxHashMap<&str, ValueId> =
        graph.inits().map(|(id, v)| (v.name.as_str(), id)).collect();
    let parameter = |gradient: &ValueId| {
        let name = graph.value(*gradient).name.strip_suffix(".grad")?;
        let parameter = *by_name.get(name)?;
        (graph.ty(parameter) == graph.ty(*gradient)).then_some((parameter, *gradient))
    };
    graph.outputs().iter().filter_map(parameter).collect()
}

/// Whether a gradient is the zeros of a parameter that the loss does not reach.
fn is_nothing(graph: &Graph, gradient: ValueId) -> bool {
    let Some(node) = graph.def_node(gradient).map(|id| graph.node(id)) else {
        return false;
    };
    let filled = node.ins.first().copied().flatten();
    let constant = filled.and_then(|v| graph.value(v).tensor());
    let is_zero = |t: &crate::ir::Tensor| t.elements() == 1 && t.get_f64(0) == Some(0.0);
    node.op == &EXPAND && constant.is_some_and(is_zero)
}

/// Updates in the order in which they can run. A view of a parameter counts as the parameter: whatever reads what only
/// changes its layout reads it.
fn placed(graph: &Graph, gradients: &[(ValueId, ValueId)]) -> Vec<Update> {
    let mut shows: SecondaryMap<ValueId, Option<ValueId>> =
        SecondaryMap::new(graph.value_bound(), None);
    let mut last: SecondaryMap<ValueId, usize> = SecondaryMap::new(graph.value_bound(), 0);
    for (parameter, _) in gradients {
        shows[*parameter] = Some(*parameter);
    }
    for (position, id) in graph.order().iter().enumerate() {
        let node = graph.node(*id);
        for value in node.ins.iter().flatten() {
            if let Some(parameter) = shows[*value] {
                last[parameter] = position;
            }
        }
        let moved = node.ins.first().copied().flatten();
        for out in &node.outs {
            last[*out] = position;
            shows[*out] = moved.filter(|_| node.op.is_layout()).and_then(|v| shows[v]);
        }
    }
    let mut updates: Vec<Update> = gradients
        .iter()
        .map(|(parameter, gradient)| Update {
            parameter: *parameter,
            gradient: *gradient,
            after: last[*parameter].max(last[*gradient]),
        })
        .collect();
    updates.sort_by_key(|update| update.after);
    updates
}

/// A new input.
fn input(graph: &mut Graph, name: &str, ty: Ty) -> Result<ValueId> {
    free(graph, name)?;
    Ok(graph.add_input(name, Some(ty)))
}

fn free(graph: &Graph, name: &str) -> Result<()> {
    match graph.has_value_name(name) {
        true => Err(Error::model(
            "name",
            format!("the optimizer has a value `{name}`, but the model uses that name"),
        )),
        false => Ok(()),
    }
}

/// Emits the updates of one parameter; the result is the new outputs.
fn emit(
    b: &mut Builder,
    optimizer: &Optimizer,
    update: &Update,
    states: &[ValueId],
    (lr, step): (ValueId, Option<ValueId>),
) -> Result<Vec<ValueId>> {
    let (p, g) = (update.parameter, update.gradient);
    let mut made = Vec::new();
    match *optimizer {
        Optimizer::Sgd {
            momentum,
            dampening,
            weight_decay,
            nesterov,
        } => {
            let decay = Attrs::new().with(WEIGHT_DECAY, weight_decay);
            let (ins, attrs) = if let [buffer] = *states {
                let ins = vec![
                    Some(buffer),
                    Some(g),
                    (weight_decay != 0.0).then_some(p),
                    step,
                ];
                let attrs = decay
                    .clone()
                    .with(MOMENTUM_FACTOR, momentum)
                    .with(DAMPENING, dampening);
                let buffer = renewed(b, &MOMENTUM, ins, attrs, buffer)?;
                made.push(buffer);
                match nesterov {
                    true => (
                        vec![Some(p), Some(g), Some(lr), Some(buffer)],
                        decay.with(MOMENTUM_FACTOR, momentum),
                    ),
                    false => (vec![Some(p), Some(buffer), Some(lr)], Attrs::new()),
                }
            } else {
                (vec![Some(p), Some(g), Some(lr)], decay)
            };
            made.insert(0, renewed(b, &SGD, ins, attrs, p)?);
        }
        Optimizer::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
        } => {
            let [mean, square] = *states else {
                return Err(Error::bug("optimizer", "AdamW keeps two states"));
            };
            let of = |beta: f32| Attrs::new().with(BETA, beta);
            let mean = renewed(b, &ADAM_MEAN, vec![Some(mean), Some(g)], of(beta1), mean)?;
            let ins = vec![Some(square), Some(g)];
            let square = renewed(b, &ADAM_SQUARE, ins, of(beta2), square)?;
            let attrs = Attrs::new()
                .with(BETA1, beta1)
                .with(BETA2, beta2)
                .with(EPS, eps)
                .with(WEIGHT_DECAY, weight_decay);
            let ins = vec![Some(p), Some(mean), Some(square), Some(lr), step];
            made.push(renewed(b, &ADAMW, ins, attrs, p)?);
            made.extend([mean, square]);
        }
    }
    Ok(made)
}

/// A new input of the parameter's type.
fn state(graph: &mut Graph, parameter: ValueId, end: &str) -> Result<ValueId> {
    let name = format!("{}{end}", graph.value(parameter).name);
    let ty = graph.ty(parameter).clone();
    input(graph, &name, ty)
}

/// Emits an update of `old` and names its result after it.
fn renewed(
    b: &mut Builder,
    op: &'static crate::ir::OpDef,
    mut ins: Vec<Option<ValueId>>,
    attrs: Attrs,
    old: ValueId,
) -> Result<ValueId> {
    while ins.last() == Some(&None) {
        ins.pop();
    }
    let name = format!("{}{UPDATED}", b.graph.value(old).name);
    free(b.graph, &name)?;
    let new = b.emit_n(op, ins, attrs, 1)?[0];
    b.graph.rename_value(new, &name);
    Ok(new)
}

/// The parameters that a graph updates, each with its gradient.
pub fn updated(graph: &Graph) -> Vec<(ValueId, ValueId)> {
    let mut found = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        let (Some(Some(old)), Some(Some(from))) = (node.ins.first(), node.ins.get(1)) else {
            continue;
        };
        let is_first = node.op.is_update() && node.recompute_of.is_none();
        if !is_first || !matches!(graph.value(*old).def, Def::Init(_)) {
            continue;
        }
        // Through the state that the step is made of.
        let mut gradient = *from;
        while let Some(maker) = update_node(graph, gradient)
            && let Some(Some(from)) = graph.node(maker).ins.get(1)
        {
            gradient = *from;
        }
        found.push((*old, gradient));
    }
    found
}

/// The update that makes a value, if one does.
pub fn update_node(graph: &Graph, value: ValueId) -> Option<NodeId> {
    graph
        .def_node(value)
        .filter(|id| graph.node(*id).op.is_update())
}

/// Whether an update of the graph reads the input that counts steps.
pub fn counts_steps(graph: &Graph) -> bool {
    let reads_it = |v: &ValueId| {
        let mut uses = graph.value(*v).uses().iter();
        graph.value(*v).name == STEP && uses.any(|u| graph.node(u.node).op.is_update())
    };
    graph.inputs().iter().any(reads_it)
}

/// Inputs that are states: what updates are of and is no parameter.
pub fn states(graph: &Graph) -> Vec<ValueId> {
    let updates = graph.order().iter().map(|id| graph.node(*id));
    let updates = updates.filter(|node| node.op.is_update() && node.recompute_of.is_none());
    let old = updates.filter_map(|node| node.ins.first().copied().flatten());
    old.filter(|v| graph.value(*v).def == Def::Input).collect()
}
