//! Appends the optimizer: the value of each parameter, and of the state kept for it, in the next step.
//!
//! In and out: `Training`. Gradients are found by their names (`<initializer>.grad`). A parameter that the loss does not
//! reach is left alone, as PyTorch leaves alone a parameter without a gradient. New inputs: `lr` (float32 scalar), `step`
//! (int64 scalar, from 1) where the formula counts steps, and the state of each parameter, of the parameter's type
//! (`<initializer>.momentum`, `.exp_avg`, `.exp_avg_sq`; all zeros before the first step). New outputs:
//! `<initializer>.updated` and `<state>.updated`.
//!
//! An update is a function of the old tensor, so no order of nodes makes it wrong. Where it is the last reader, it is
//! written over its operand and takes no memory (`analysis::memory`). The order is therefore chosen so that it is the
//! last reader. Appended updates run at the end, and gradients stay outputs. A fused update runs as soon as its gradient
//! is complete and its parameter was read for the last time. Its gradient is no output, so gradients never all live at
//! once.

use super::dce::dce;
use crate::analysis::gradients::STEP;
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, DType, Graph, OpDef, Role, SecondaryMap, Tensor, Ty, ValueId};
use crate::ops::optimizer::{
    ADAM_MEAN, ADAM_SQUARE, ADAMW, BETA, BETA1, BETA2, DAMPENING, EPS, MOMENTUM, MOMENTUM_FACTOR,
    SGD, WEIGHT_DECAY, decimal,
};
use crate::ops::shape::EXPAND;
use crate::ops::{Builder, EmitExt};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::fmt;

/// Name of the input that is the learning rate.
pub const LR: &str = "lr";
/// Suffix of what an update makes.
pub const UPDATED: &str = ".updated";
/// Suffixes of states.
pub const STATES: [&str; 3] = [".momentum", ".exp_avg", ".exp_avg_sq"];

/// An optimizer and its constants, which mean what they mean in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd {
        /// Factor of the momentum buffer; 0 for no buffer.
        momentum: f32,
        /// Share of the gradient that the buffer does not take.
        dampening: f32,
        /// Factor of the parameter that is added to the gradient.
        weight_decay: f32,
        /// The Nesterov form of momentum.
        nesterov: bool,
    },
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay of the mean of gradients.
        beta1: f32,
        /// Decay of the mean of squared gradients.
        beta2: f32,
        /// Added to the root of the mean of squares.
        eps: f32,
        /// Factor of the learning rate by which a parameter shrinks in each step.
        weight_decay: f32,
    },
}

impl Optimizer {
    /// Parses `sgd`, `adamw` or either with settings: `adamw:beta1=0.9,eps=1e-8`. A setting that is not given has
    /// PyTorch's default.
    ///
    /// # Errors
    /// An unknown optimizer or setting, a setting given twice, a number out of its range or with more digits than float32
    /// holds.
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
        let known = self.words();
        if let (Optimizer::Sgd { nesterov, .. }, "nesterov") = (&mut *self, key) {
            *nesterov = value.parse().map_err(|_| {
                fail(format!("`nesterov` cannot be `{value}`")).expected("true or false")
            })?;
            return Ok(());
        }
        let found = self.numbers().into_iter().find(|(name, _)| *name == key);
        let Some((_, setting)) = found else {
            return Err(fail(format!("there is no setting `{key}`")).expected(known));
        };
        *setting = number(key, value, key.starts_with(BETA))?;
        Ok(())
    }

    /// Returns the settings that are numbers, by their words.
    fn numbers(&mut self) -> Vec<(&'static str, &mut f32)> {
        match self {
            Optimizer::Sgd {
                momentum,
                dampening,
                weight_decay,
                ..
            } => vec![
                (MOMENTUM_FACTOR, momentum),
                (DAMPENING, dampening),
                (WEIGHT_DECAY, weight_decay),
            ],
            Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => vec![
                (BETA1, beta1),
                (BETA2, beta2),
                (EPS, eps),
                (WEIGHT_DECAY, weight_decay),
            ],
        }
    }

    /// Returns the words of all settings, for an error.
    fn words(mut self) -> String {
        let is_sgd = matches!(self, Optimizer::Sgd { .. });
        let numbers = self.numbers().into_iter().map(|(word, _)| word);
        let words: Vec<&str> = numbers.chain(is_sgd.then_some("nesterov")).collect();
        words.join(", ")
    }

    /// Returns the suffixes of the states that it keeps for a parameter.
    fn states(&self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { momentum: 0.0, .. } => &[],
            Optimizer::Sgd { .. } => &STATES[..1],
            Optimizer::AdamW { .. } => &STATES[1..],
        }
    }

    /// Returns true if its formula reads the number of the step.
    fn counts_steps(&self) -> bool {
        match self {
            Optimizer::Sgd { dampening, .. } => !self.states().is_empty() && *dampening != 0.0,
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
    /// Number of parameters that are updated.
    pub parameters: usize,
    /// Names of parameters that the loss does not reach: they stay as they are.
    pub unreached: Vec<String>,
}

/// The update of one parameter.
struct Update {
    parameter: ValueId,
    gradient: ValueId,
    /// Position of the last node that reads the parameter or makes the gradient.
    ready_after: usize,
}

/// Adds an update for each parameter that has a gradient; with `fuse` as early as possible.
///
/// # Errors
/// A graph that already has updates, or no gradient of an initializer; a name that is taken.
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
    let (reached, unreached): (Vec<_>, Vec<_>) = gradients
        .iter()
        .copied()
        .partition(|(_, gradient)| !is_zero_gradient(graph, *gradient));
    let name = |(parameter, _): &(ValueId, ValueId)| graph.value(*parameter).name.clone();
    let done = Updates {
        parameters: reached.len(),
        unreached: unreached.iter().map(name).collect(),
    };
    let updates = in_order(graph, &reached);
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
    // States and outputs follow the order of the gradients, updates the order in which they can run.
    let mut states: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    for (parameter, _) in &reached {
        let own = optimizer.states().iter().map(|end| {
            let name = format!("{}{end}", graph.value(*parameter).name);
            let ty = graph.ty(*parameter).clone();
            input(graph, &name, ty)
        });
        states.insert(*parameter, own.collect::<Result<_>>()?);
    }
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    b.role = Role::Backward;
    // For each new node, in order: the position after which it may run.
    let mut ready_after = Vec::new();
    let mut made: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    for update in &updates {
        b.prefix = b.graph.value(update.parameter).name.clone();
        b.loc = Default::default();
        let of = &states[&update.parameter];
        let results = emit(&mut b, optimizer, update, of, (lr, step))?;
        made.insert(update.parameter, results);
        ready_after.resize(b.graph.order().len() - first, update.ready_after);
    }
    outputs.extend(reached.iter().flat_map(|(parameter, _)| &made[parameter]));
    graph.set_outputs(outputs);
    if fuse {
        let mut order = Vec::with_capacity(graph.order().len());
        let (old, new) = graph.order().split_at(first);
        let mut new = new.iter().zip(ready_after).peekable();
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

/// Returns initializers and their gradients among the outputs, in output order.
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

/// Returns true for the zeros that stand for the gradient of a parameter that the loss does not reach.
fn is_zero_gradient(graph: &Graph, gradient: ValueId) -> bool {
    let Some(node) = graph.def_node(gradient).map(|id| graph.node(id)) else {
        return false;
    };
    let constant = node.operand(0).and_then(|v| graph.value(v).tensor());
    let is_zero = |t: &Tensor| t.elements() == 1 && t.get_f64(0) == Some(0.0);
    node.op == &EXPAND && constant.is_some_and(is_zero)
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
        ready_after: last[*parameter].max(last[*gradient]),
    };
    let mut updates: Vec<Update> = gradients.iter().map(update).collect();
    updates.sort_by_key(|update| update.ready_after);
    updates
}

/// Adds a graph input.
fn input(graph: &mut Graph, name: &str, ty: Ty) -> Result<ValueId> {
    check_free(graph, name)?;
    Ok(graph.add_input(name, Some(ty)))
}

fn check_free(graph: &Graph, name: &str) -> Result<()> {
    match graph.has_value_name(name) {
        true => Err(Error::model(
            "name",
            format!("the optimizer has a value `{name}`, but the model uses that name"),
        )),
        false => Ok(()),
    }
}

/// Emits the updates of one parameter. Returns the new outputs.
fn emit(
    b: &mut Builder,
    optimizer: &Optimizer,
    update: &Update,
    states: &[ValueId],
    (lr, step): (ValueId, Option<ValueId>),
) -> Result<Vec<ValueId>> {
    let (p, g) = (update.parameter, update.gradient);
    match *optimizer {
        Optimizer::Sgd {
            momentum,
            dampening,
            weight_decay,
            nesterov,
        } => {
            let decay = Attrs::new().with(WEIGHT_DECAY, weight_decay);
            let [buffer] = *states else {
                let ins = vec![Some(p), Some(g), Some(lr)];
                return Ok(vec![emit_update(b, &SGD, ins, decay, p)?]);
            };
            let decayed = (weight_decay != 0.0).then_some(p);
            let ins = vec![Some(buffer), Some(g), decayed, step];
            let with_momentum = decay.with(MOMENTUM_FACTOR, momentum);
            let attrs = with_momentum.clone().with(DAMPENING, dampening);
            let buffer = emit_update(b, &MOMENTUM, ins, attrs, buffer)?;
            let (ins, attrs) = match nesterov {
                true => (
                    vec![Some(p), Some(g), Some(lr), Some(buffer)],
                    with_momentum,
                ),
                false => (vec![Some(p), Some(buffer), Some(lr)], Attrs::new()),
            };
            Ok(vec![emit_update(b, &SGD, ins, attrs, p)?, buffer])
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
            let ins = |state: ValueId| vec![Some(state), Some(g)];
            let mean = emit_update(b, &ADAM_MEAN, ins(mean), of(beta1), mean)?;
            let square = emit_update(b, &ADAM_SQUARE, ins(square), of(beta2), square)?;
            let attrs = Attrs::new()
                .with(BETA1, beta1)
                .with(BETA2, beta2)
                .with(EPS, eps)
                .with(WEIGHT_DECAY, weight_decay);
            let ins = vec![Some(p), Some(mean), Some(square), Some(lr), step];
            Ok(vec![emit_update(b, &ADAMW, ins, attrs, p)?, mean, square])
        }
    }
}

/// Emits an update of `old` and names its result after it.
fn emit_update(
    b: &mut Builder,
    op: &'static OpDef,
    mut ins: Vec<Option<ValueId>>,
    attrs: Attrs,
    old: ValueId,
) -> Result<ValueId> {
    while ins.last() == Some(&None) {
        ins.pop();
    }
    let name = format!("{}{UPDATED}", b.graph.value(old).name);
    check_free(b.graph, &name)?;
    let new = b.emit_n(op, ins, attrs, 1)?[0];
    b.graph.rename_value(new, &name);
    Ok(new)
}
