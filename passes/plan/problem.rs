//! What a planner sees: ops in order with their costs, and values with their bytes.
//!
//! The JSON form is the cost-graph format of the planner benches: `ops` in the given order, `values`, `outputs`. Temporaries,
//! views and effects are optional, so every such cost graph is a problem. There views are folded into the value that owns the
//! storage. A problem made from our own graph keeps them, because a rewritten graph needs a copy of the view wherever it
//! needs a copy of the storage. [`Problem::fold`] gives the folded form.

use super::index::{ByOp, ByValue, OpIdx, ValueIdx};
use super::steps::Step;
use ckpt_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The pass of the step that an op belongs to; the loss counts as forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpPhase {
    /// The forward pass and the loss.
    #[serde(rename = "fwd")]
    Forward,
    /// The backward pass and optimizer updates.
    #[serde(rename = "bwd")]
    Backward,
}

/// How long the bytes of a value are alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ValueKind {
    /// Produced by an op, freed after its last use.
    #[serde(rename = "act")]
    Activation,
    /// Parameters and inputs: resident throughout.
    #[serde(rename = "static")]
    Static,
    /// Alive from the start, freed after its last use.
    #[serde(rename = "ph")]
    Placeholder,
}

fn yes() -> bool {
    true
}

fn is_yes(b: &bool) -> bool {
    *b
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// One operation at known sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// Name of the node; in a foreign cost graph the name that its maker gave.
    pub name: String,
    /// The op's name in the table (`MatMul`); a foreign cost graph's own word.
    #[serde(default, alias = "target", skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Values read; a value that is read twice is listed twice.
    pub ins: Vec<ValueIdx>,
    /// Values produced; an op is the producer of each.
    pub outs: Vec<ValueIdx>,
    /// Pass that the op belongs to.
    pub phase: OpPhase,
    /// The objective adds these up: microseconds, unless the maker of the graph says otherwise.
    pub cost: f64,
    /// Floating-point operations of one run.
    #[serde(default)]
    pub flops: u64,
    /// Bytes read and written.
    #[serde(default)]
    pub bytes: u64,
    /// Temporaries while it runs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub temp_bytes: u64,
    /// Bytes that a rank receives from the others.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub link_bytes: u64,
    /// Operands that the first result may be written over. If one of them is not read again, the result takes no bytes
    /// beside it. They have as many bytes as that result. A result that is written over a static operand is listed without
    /// bytes: it takes as many as the operand if that is read again or is an output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_place_operands: Vec<ValueIdx>,
    /// Whether running it again gives the same bits and is allowed.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub recomputable: bool,
    /// Whether backward ops read its results only from a later run than the first: the maker of the graph wants it so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub must_recompute: bool,
    /// Whether its first run comes after those of all such ops that are listed before it, in every order: it draws from a
    /// generator, or has an effect outside.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ordered: bool,
    /// The number of the layer that it belongs to, where the maker of a cost graph knows it: policies by layer read it. For a model
    /// [`super::annotations::OpAnnotations`] say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
}

/// One value at known sizes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Value {
    /// Bytes of its storage; 0 for a view, whose storage is another value's.
    pub bytes: u64,
    /// How long the bytes are alive.
    pub kind: ValueKind,
    /// Op that computes it; `None` for a value that is there from the start.
    pub producer: Option<OpIdx>,
    /// The operand of its producer that it is a view of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view_of: Option<ValueIdx>,
    /// An integer or boolean value: indices, masks, shapes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub integral: bool,
}

/// A training step as a planner sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// In the given order: each op comes after those whose results it reads.
    pub ops: ByOp<Op>,
    /// All values; the `ins` and `outs` of ops are indices into them.
    pub values: ByValue<Value>,
    /// Values that must be alive at the end.
    pub outputs: Vec<ValueIdx>,
    /// What moving bytes out of this memory or back costs; `None` where nothing can be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Transfer>,
    /// The bytes of each value that stay here while it is moved, where ranks keep slices; 0 for a value that cannot be moved. Empty
    /// where results leave this memory whole.
    #[serde(skip)]
    pub slices: ByValue<u64>,
    /// Whether bytes of values are upper bounds, for data decides some sizes.
    #[serde(skip)]
    pub is_bound: bool,
}

/// The cost of moving a storage, each way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Microseconds to move a million bytes one way.
    pub us_per_megabyte: f64,
    /// The start of each transfer.
    pub start_us: f64,
    /// The share of the time of the bytes that other ops lose: 0 where an engine of its own copies, 1 where nothing else
    /// runs meanwhile.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub busy_share: f64,
}

fn is_nothing(x: &f64) -> bool {
    *x == 0.0
}

impl Op {
    /// Returns an op that may be recomputed, with no work but its cost.
    pub fn new(
        name: impl Into<String>,
        ins: impl IntoIterator<Item = impl Into<ValueIdx>>,
        outs: impl IntoIterator<Item = impl Into<ValueIdx>>,
        phase: OpPhase,
        cost: f64,
    ) -> Op {
        Op {
            name: name.into(),
            kind: String::new(),
            ins: ins.into_iter().map(Into::into).collect(),
            outs: outs.into_iter().map(Into::into).collect(),
            phase,
            cost,
            flops: 0,
            bytes: 0,
            temp_bytes: 0,
            link_bytes: 0,
            in_place_operands: Vec::new(),
            recomputable: true,
            must_recompute: false,
            ordered: false,
            layer: None,
        }
    }
}

impl Value {
    /// Returns a value that is no view.
    pub fn new(bytes: u64, kind: ValueKind, producer: Option<OpIdx>) -> Value {
        Value {
            bytes,
            kind,
            producer,
            view_of: None,
            integral: false,
        }
    }
}

impl Transfer {
    /// Returns the time that so many bytes take one way, in microseconds.
    pub fn cost(&self, bytes: u64) -> f64 {
        self.start_us + self.us_per_megabyte * bytes as f64 / 1e6
    }

    /// Returns the part of a transfer's cost that no op can run beside.
    pub fn own_us(&self, cost: f64) -> f64 {
        self.start_us.min(cost) + self.busy_share * (cost - self.start_us).max(0.0)
    }

    /// Returns the least that a step loses if so many bytes leave and return, with transfers `beside` other ops or not.
    pub fn wait(&self, bytes: u64, beside: bool) -> Wait {
        let whole_us = self.cost(bytes);
        match beside {
            true => Wait {
                own_us: self.own_us(whole_us),
                lane_us: (whole_us - self.start_us).max(0.0),
            },
            false => Wait {
                own_us: whole_us,
                lane_us: 0.0,
            },
        }
    }
}

/// What a step loses by offloading the results of one op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wait {
    /// Each way, the time that nothing runs beside.
    pub own_us: f64,
    /// Each way, the time that the lane is taken; 0 where nothing runs beside a transfer.
    pub lane_us: f64,
}

/// No step of a foreign problem takes more memory: sums up to 2⁵³ are exact as floats too.
const MAX_BYTES: u64 = 1 << 53;

/// Nor more FLOPs or bytes moved: a schedule may repeat all of it many times before a counter is full.
const MAX_WORK: u64 = 1 << 60;

fn foreign<T>(text: String) -> Result<T> {
    Err(Error::model("cost-graph", text))
}

impl Problem {
    /// Fills in the producers that a foreign cost graph leaves out: its ops say who makes what.
    ///
    /// # Errors
    /// A value that two ops make, or one op twice; a producer that the file claims and that is not true.
    pub fn settle_producers(&mut self) -> Result<()> {
        let mut maker: ByValue<Option<OpIdx>> = self.by_value(None);
        for (o, op) in self.ops.enumerated() {
            for v in &op.outs {
                let Some(place) = maker.get_mut(v.0) else {
                    return self.unknown_value(o, *v);
                };
                if let Some(first) = place.replace(o) {
                    return foreign(format!(
                        "value {v} is made by op {} and again by op {}: every value has one maker",
                        self.called(first),
                        self.called(o)
                    ));
                }
            }
        }
        for (v, (value, maker)) in self.values.iter_mut().zip(maker).enumerate() {
            if value.producer.is_some() && value.producer != maker {
                return foreign(format!("value {v} is not made by its producer"));
            }
            value.producer = maker;
        }
        Ok(())
    }

    fn unknown_value<T>(&self, op: OpIdx, value: ValueIdx) -> Result<T> {
        let op = self.called(op);
        foreign(format!("op {op} names value {value}, which does not exist"))
    }

    /// Returns an op as errors name it.
    fn called(&self, op: OpIdx) -> String {
        match self.ops.at(op) {
            Some(known) if !known.name.is_empty() => format!("{op} (`{}`)", known.name),
            _ => op.to_string(),
        }
    }

    /// Checks what a foreign problem must satisfy: its indices exist, it can run in its own order, and its sums can be
    /// counted exactly. Linear.
    ///
    /// # Errors
    /// The first thing that is wrong, with the op or value it is about.
    pub fn check(&self) -> Result<()> {
        let (mut flops, mut traffic_bytes, mut cost) = (0u64, 0u64, 0.0f64);
        let mut temp_bytes = 0;
        // Whether each value exists yet.
        let mut there: ByValue<bool> = self
            .values
            .iter()
            .map(|v| v.producer.is_none() && v.kind != ValueKind::Activation)
            .collect();
        for (o, op) in self.ops.enumerated() {
            for v in &op.ins {
                match there.at(*v) {
                    Some(true) => {}
                    None => return self.unknown_value(o, *v),
                    Some(false) => {
                        let why = match self.values[*v].producer {
                            Some(p) if p == o => "which it makes itself".into(),
                            Some(p) => format!("which op {} makes later", self.called(p)),
                            None => "which nothing makes".into(),
                        };
                        return Err(Error::model(
                            "cost-graph",
                            format!("op {} reads value {v}, {why}", self.called(o)),
                        )
                        .help("ops are listed in an order in which they can run"));
                    }
                }
            }
            for v in &op.outs {
                match self.values.at(*v) {
                    Some(value) if value.producer == Some(o) => there[*v] = true,
                    Some(_) => return foreign(format!("value {v} is not made by its producer")),
                    None => return self.unknown_value(o, *v),
                }
            }
            let called = || self.called(o);
            let owns = |v: &ValueIdx| {
                let out = &self.values[*v];
                out.view_of.is_none() && out.kind == ValueKind::Activation
            };
            let may_write_over = op.outs.first().is_some_and(owns);
            let is_wrong = |v: &&ValueIdx| !op.ins.contains(v) || !may_write_over;
            if let Some(v) = op.in_place_operands.iter().find(is_wrong) {
                let what = format!("no result that could be written over value {v}");
                return foreign(format!("op {} has {what}", called()));
            }
            if !op.cost.is_finite() || op.cost < 0.0 {
                return foreign(format!("op {} has a cost of {}", called(), op.cost));
            }
            cost += op.cost;
            flops = flops.saturating_add(op.flops);
            traffic_bytes = traffic_bytes.saturating_add(op.bytes);
            temp_bytes = temp_bytes.max(op.temp_bytes);
        }
        if let Some(v) = self.outputs.iter().find(|v| v.0 >= self.values.len()) {
            return foreign(format!("output value {v} does not exist"));
        }
        let roots = self.roots();
        for (o, op) in self.ops.enumerated() {
            for v in &op.in_place_operands {
                let (root, bytes) = (&self.values[roots[*v]], self.values[op.outs[0]].bytes);
                let fits = match root.kind {
                    ValueKind::Static => bytes == 0 && root.producer.is_none(),
                    _ => root.bytes == bytes || root.bytes == bytes + op.temp_bytes,
                };
                if !fits {
                    let what = format!("value {v}, which is not of its result's size");
                    return foreign(format!("op {} writes over {what}", self.called(o)));
                }
            }
        }
        let mut bytes = temp_bytes;
        for (i, value) in self.values.enumerated() {
            let op = match value.producer {
                Some(p) => match self.ops.at(p) {
                    Some(op) if there[i] => Some(op),
                    _ => return foreign(format!("value {i} is not made by its producer")),
                },
                None => None,
            };
            match (value.kind, op, value.view_of) {
                (ValueKind::Activation, None, _) => {
                    return foreign(format!("value {i} is an activation without a producer"));
                }
                (ValueKind::Static | ValueKind::Placeholder, Some(op), None) => {
                    return foreign(format!(
                        "value {i} is there from the start, and op `{}` makes it",
                        op.name
                    ));
                }
                (_, op, Some(base)) if op.is_none_or(|op| !op.ins.contains(&base)) => {
                    return foreign(format!("value {i} is a view of what its op does not read"));
                }
                (_, _, Some(_)) if value.bytes > 0 => {
                    return foreign(format!("value {i} is a view and has bytes of its own"));
                }
                _ => {}
            }
            bytes = bytes.saturating_add(value.bytes);
        }
        for (what, sum, most) in [
            ("bytes of all values", bytes, MAX_BYTES),
            ("FLOPs of all ops", flops, MAX_WORK),
            ("bytes moved by all ops", traffic_bytes, MAX_WORK),
        ] {
            if sum > most {
                return foreign(format!("the {what} are more than {most} together"));
            }
        }
        if let Some(transfer) = &self.transfer {
            for x in [transfer.us_per_megabyte, transfer.start_us] {
                if !x.is_finite() || x < 0.0 {
                    return foreign(format!("a transfer has a cost of {x}"));
                }
            }
            if !(0.0..=1.0).contains(&transfer.busy_share) {
                return foreign(format!(
                    "the busy share of a transfer is {}, not from 0 to 1",
                    transfer.busy_share
                ));
            }
        }
        if !cost.is_finite() {
            return foreign("the sum of all costs is not finite".into());
        }
        Ok(())
    }

    /// Returns a table with the same entry for each op.
    pub fn by_op<T: Clone>(&self, entry: T) -> ByOp<T> {
        ByOp::filled(entry, self.ops.len())
    }

    /// Returns a table with the same entry for each value.
    pub fn by_value<T: Clone>(&self, entry: T) -> ByValue<T> {
        ByValue::filled(entry, self.values.len())
    }

    /// Returns the bytes of the results of an op.
    pub fn result_bytes(&self, op: OpIdx) -> u64 {
        let outs = self.ops[op].outs.iter();
        outs.map(|v| self.values[*v].bytes).sum()
    }

    /// Returns what a step adds to the cost of a schedule, if nothing runs beside a transfer.
    pub fn cost(&self, step: Step) -> f64 {
        match step {
            Step::Run(op) => self.ops[op].cost,
            // A rank has its slice already.
            Step::Offload(_) if !self.slices.is_empty() => 0.0,
            Step::Offload(op) | Step::Fetch(op) => {
                let bytes = self.result_bytes(op);
                self.transfer.map_or(0.0, |transfer| transfer.cost(bytes))
            }
            Step::Release(_) => 0.0,
        }
    }

    /// Returns the bytes that stay here of the results of an op while they are moved.
    pub fn slice_bytes(&self, op: OpIdx) -> u64 {
        let slices = self.ops[op]
            .outs
            .iter()
            .filter_map(|v| self.slices.get(v.0));
        slices.sum()
    }

    /// Returns whether the results of each op may be offloaded between the forward and the backward pass.
    pub fn movable(&self) -> ByOp<bool> {
        let leaves = self.may_leave();
        let is_forward = |op: &OpIdx| self.ops[*op].phase == OpPhase::Forward;
        let each = leaves.indices().map(|op| leaves[op] && is_forward(&op));
        each.collect()
    }

    /// Returns whether the results of each op may leave the device at all: storages that the op owns, all of them read, none a
    /// graph output, and none that other ranks may still be writing. Where ranks keep slices, each of them has the results whole.
    pub fn may_leave(&self) -> ByOp<bool> {
        let mut is_read = self.by_value(false);
        for v in self.ops.iter().flat_map(|op| &op.ins) {
            is_read[*v] = true;
        }
        let roots = self.roots();
        let mut is_output = self.by_value(false);
        for v in &self.outputs {
            is_output[roots[*v]] = true;
        }
        let moves = |v: &ValueIdx| {
            let value = &self.values[*v];
            let is_owned = value.kind == ValueKind::Activation && value.view_of.is_none();
            let stays = self.slices.get(v.0) == Some(&0);
            is_owned && is_read[*v] && !is_output[*v] && !stays
        };
        let leaves = |op: &Op| {
            let is_exchanged = op.phase == OpPhase::Backward && op.link_bytes > 0;
            !op.outs.is_empty() && !is_exchanged && op.outs.iter().all(&moves)
        };
        self.ops.iter().map(leaves).collect()
    }

    /// Returns whether the results of each op rest between the passes: after their last reader in the forward pass and before their
    /// first in the backward pass, ops make as many bytes as they have. Others, as scores before their loss, are read again at once.
    pub fn rests(&self) -> ByOp<bool> {
        let roots = self.roots();
        let mut last = self.by_value(0);
        let mut first = self.by_value(usize::MAX);
        let mut made = vec![0u64];
        for (o, op) in self.ops.enumerated() {
            made.push(made[o.0] + self.result_bytes(o));
            for v in op.ins.iter().map(|v| roots[*v]) {
                match op.phase {
                    OpPhase::Forward => last[v] = o.0,
                    OpPhase::Backward => first[v] = first[v].min(o.0),
                }
            }
        }
        let rests = |o: OpIdx| {
            let outs = &self.ops[o].outs;
            let from = outs.iter().map(|v| last[*v]).max().unwrap_or(0).max(o.0) + 1;
            let to = outs.iter().map(|v| first[*v]).min();
            let to = to.filter(|at| (from..made.len()).contains(at));
            to.is_some_and(|to| made[to] - made[from] >= self.result_bytes(o))
        };
        self.ops.indices().map(rests).collect()
    }

    /// Checks that the results of these ops can be offloaded.
    ///
    /// # Errors
    /// An op whose results cannot be moved, or a problem that does not say what transfers cost.
    pub fn check_movable(&self, offloaded: &[OpIdx]) -> Result<()> {
        if offloaded.is_empty() {
            return Ok(());
        }
        let leaves = self.may_leave();
        if let Some(op) = offloaded.iter().find(|op| leaves.at(**op) != Some(&true)) {
            let name = self.ops.at(*op).map_or("?", |o| o.name.as_str());
            let what = format!("the results of op {op} (`{name}`) cannot be moved");
            return Err(Error::usage("offload", what).expected(
                "activations and gradients that something reads and that are no outputs",
            ));
        }
        match self.transfer {
            Some(_) => Ok(()),
            None => Err(Error::usage(
                "offload",
                "this problem does not say what moving values costs",
            )
            .expected("`transfer`: {us_per_megabyte, start_us}")),
        }
    }

    /// Returns the value that owns each value's storage; itself for what is not a view. Linear.
    pub fn roots(&self) -> ByValue<ValueIdx> {
        let mut roots: ByValue<ValueIdx> = self.values.indices().collect();
        for op in &self.ops {
            for out in &op.outs {
                if let Some(base) = self.values[*out].view_of {
                    roots[*out] = roots[base];
                }
            }
        }
        roots
    }

    /// Returns whether an op only makes views.
    pub fn is_view(&self, op: OpIdx) -> bool {
        self.ops[op]
            .outs
            .iter()
            .all(|v| self.values[*v].view_of.is_some())
    }

    /// Returns the order of the problem itself: every op once.
    pub fn given_order(&self) -> Vec<OpIdx> {
        self.ops.indices().collect()
    }

    /// Returns the bytes that are resident throughout.
    pub fn static_bytes(&self) -> u64 {
        self.values
            .iter()
            .filter(|v| v.kind == ValueKind::Static)
            .map(|v| v.bytes)
            .sum()
    }

    /// Returns the same problem with its ops listed in another order in which they can run. Values keep their indices.
    pub fn in_order(&self, order: &[OpIdx]) -> Problem {
        let mut place = self.by_op(OpIdx(0));
        for (new, old) in order.iter().enumerate() {
            place[*old] = OpIdx(new);
        }
        let mut values = self.values.clone();
        for value in &mut values {
            value.producer = value.producer.map(|p| place[p]);
        }
        Problem {
            ops: order.iter().map(|o| self.ops[*o].clone()).collect(),
            values,
            outputs: self.outputs.clone(),
            transfer: self.transfer,
            slices: self.slices.clone(),
            is_bound: self.is_bound,
        }
    }
}

/// Returns a short fingerprint of a problem's operations, so that a stored plan is not applied to something else.
pub fn fingerprint(problem: &Problem) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut feed = |bytes: &[u8]| {
        for b in bytes {
            hash = (hash ^ *b as u64).wrapping_mul(0x100_0000_01b3);
        }
    };
    for op in &problem.ops {
        feed(op.kind.as_bytes());
        feed(&[0]);
        for v in op.ins.iter().chain(&op.outs) {
            feed(&(v.0 as u64).to_le_bytes());
        }
    }
    format!("{hash:016x}")
}
