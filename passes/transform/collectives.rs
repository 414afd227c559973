//! Shares the training step among ranks: processes that run one graph, each on its own examples of a batch.
//!
//! In and out: `Training`, after the loss is weighted ([`weigh_loss`], from `Typed`). Every rank has the mean loss of its
//! own examples. The mean over all ranks weighs it by its share of what counts (labels that are not ignored, or elements), so
//! the backward pass of a rank starts from that share, and gradients are plain sums over ranks. The output `loss` is the
//! mean over all ranks.
//!
//! A gradient is summed as soon as it is complete ([`reduce_gradients`]), before whatever reads it; [`super::overlap`] has
//! other nodes run meanwhile. Where updates keep
//! only a slice of their states on each rank ([`Shard`]), `optimizer` asks for the slices.

use crate::analysis::gradients::{gradient_outputs, is_zero_gradient};
use crate::analysis::placement::{Mean, mean_of_examples};
use crate::error::{Error, Result};
use crate::ir::op::Effect;
use crate::ir::typing::Contents;
use crate::ir::{Attrs, DType, Graph, Id, NodeId, Role, ValueId};
use crate::ops::collective::{
    ALL_REDUCE, DATA_PARALLEL, TENSOR_PARALLEL, groups, of_group, set_ranks,
};
use crate::ops::names::{EQUAL, GREATER, MAX, NOT, REDUCE_SUM, SIZE, WHERE};
use crate::ops::{Builder, EmitExt};
use crate::transform::loss::Seed;
use crate::transform::unsort::{has_groups, unsort};
use std::collections::BTreeMap;
use std::fmt;

/// What each rank keeps a slice of, instead of the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shard {
    /// Nothing: gradients are summed, and every rank updates all parameters.
    #[default]
    None,
    /// Optimizer states (ZeRO-1).
    Optimizer,
    /// Optimizer states, and gradients once they are summed (ZeRO-2).
    Grads,
    /// Those, and parameters that are updated (ZeRO-3).
    Params,
}

/// The values of `--shard`.
const SHARDS: [(&str, Shard); 4] = [
    ("none", Shard::None),
    ("optimizer", Shard::Optimizer),
    ("grads", Shard::Grads),
    ("params", Shard::Params),
];

/// The ranks that share a training step: `dp` groups of `tp` ranks. Ranks of one group have neighbouring numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// How many ranks, or groups of ranks, train on different examples.
    pub dp: u32,
    /// How many ranks share the layers, each with its part of them.
    pub tp: u32,
    /// Whether those ranks also share the rows between the layers' blocks.
    pub shares_rows: bool,
    /// What each of `dp` ranks keeps a slice of.
    pub shard: Shard,
    /// Bytes of gradients that are exchanged together, beside the backward pass; 0 where each is summed at once.
    pub bucket_bytes: u64,
}

impl Default for Mesh {
    fn default() -> Mesh {
        Mesh {
            dp: 1,
            tp: 1,
            shares_rows: false,
            shard: Shard::None,
            bucket_bytes: 0,
        }
    }
}

/// The usual bytes of a bucket, those of PyTorch's DDP.
pub const BUCKET: &str = "25MiB";

fn fail(what: impl Into<String>) -> Box<Error> {
    Error::usage("mesh", what)
}

impl Mesh {
    /// Parses the value of `--mesh`: `dp=N`, `tp=N` or both, separated by a comma. Returns the mesh without its other fields.
    ///
    /// # Errors
    /// An axis that is none, or is named twice; no number of ranks.
    pub fn parse(text: &str) -> Result<Mesh> {
        let wrong = || {
            fail("no such mesh")
                .expected("dp=N, tp=N or dp=N,tp=M, with at most 65535 ranks")
                .found(text)
        };
        let (mut dp, mut tp) = (None, None);
        for axis in text.split(',') {
            let (name, ranks) = axis.split_once('=').ok_or_else(wrong)?;
            let slot = match name {
                DATA_PARALLEL => &mut dp,
                TENSOR_PARALLEL => &mut tp,
                _ => return Err(wrong()),
            };
            let ranks = ranks.parse().ok().filter(|n| (1..=0xffff).contains(n));
            if slot.replace(ranks.ok_or_else(wrong)?).is_some() {
                return Err(wrong());
            }
        }
        let mesh = Mesh {
            dp: dp.unwrap_or(1),
            tp: tp.unwrap_or(1),
            ..Mesh::default()
        };
        match mesh.ranks() <= 0xffff {
            true => Ok(mesh),
            false => Err(wrong()),
        }
    }

    /// Returns the number of all ranks.
    pub fn ranks(&self) -> u32 {
        self.dp.saturating_mul(self.tp)
    }

    /// Checks that a mesh can be built.
    ///
    /// # Errors
    /// Slices to keep, and no other rank that has the same part of the layers; `--sequence-parallel` where no ranks share layers.
    pub fn check(&self) -> Result<()> {
        if self.shares_rows && self.tp == 1 {
            return Err(
                fail("--sequence-parallel needs ranks that share layers, and none do")
                    .expected("--mesh tp=N or dp=M,tp=N")
                    .found(format!("--mesh {self} and --sequence-parallel"))
                    .help("leave --sequence-parallel out, or add tp to --mesh"),
            );
        }
        if self.ranks() == 1 && self.shard != Shard::None {
            return Err(fail("--shard needs ranks that share the step")
                .expected("--mesh dp=N")
                .found(format!("--shard {} and one process", self.shard))
                .help("add --mesh dp=N, or leave --shard out"));
        }
        match self.tp > 1 && self.dp == 1 && self.shard != Shard::None {
            false => Ok(()),
            true => Err(fail(
                "each part of the layers is on one rank, so there is none to share its slices with",
            )
            .expected("--mesh dp=M,tp=N")
            .found(format!("--mesh {self} and --shard {}", self.shard))
            .help("leave --shard out, or add dp to --mesh")),
        }
    }
}

impl Shard {
    /// Parses the value of `--shard`.
    ///
    /// # Errors
    /// A word that is none.
    pub fn parse(text: &str) -> Result<Shard> {
        let known = SHARDS.iter().find(|(word, _)| *word == text);
        known.map(|(_, shard)| *shard).ok_or_else(|| {
            fail("nothing of that name can be sharded")
                .expected("none, optimizer, grads or params")
                .found(text)
        })
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.dp, self.tp) {
            (dp, 1) => write!(f, "{DATA_PARALLEL}={dp}"),
            (1, tp) => write!(f, "{TENSOR_PARALLEL}={tp}"),
            (dp, tp) => write!(f, "{DATA_PARALLEL}={dp},{TENSOR_PARALLEL}={tp}"),
        }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = SHARDS.iter().find(|(_, shard)| shard == self);
        f.write_str(known.map_or("", |(word, _)| word))
    }
}

/// Returns true if a graph has ops over ranks.
pub fn has_collectives(graph: &Graph) -> bool {
    let mut nodes = graph.nodes();
    nodes.any(|(_, node)| node.op.effect == Effect::Collective)
}

/// Makes the mesh those ranks that the collectives of a model are over. Returns whether it has some of its own.
///
/// # Errors
/// Collectives over another number of ranks; ranks that share layers.
pub fn take_own(graph: &mut Graph, mesh: &Mesh) -> Result<bool> {
    let is_own = |id: &&NodeId| graph.node(**id).op.effect == Effect::Collective;
    let Some(first) = graph.order().iter().find(is_own) else {
        return Ok(false);
    };
    let first = graph.describe(*first);
    if mesh.tp > 1 {
        return Err(
            fail("the model has collectives of its own, so ranks cannot share its layers")
                .at(first)
                .help("leave tp out, or export the model without collectives"),
        );
    }
    set_ranks(graph, DATA_PARALLEL, i64::from(mesh.dp));
    let groups = groups(graph).into_iter();
    match groups
        .map(|(_, ranks)| ranks)
        .find(|n| *n != i64::from(mesh.dp))
    {
        None => Ok(true),
        Some(ranks) => Err(
            fail("the collectives of the model are over another number of ranks")
                .at(first)
                .expected(format!("{ranks} ranks"))
                .found(format!("--mesh {mesh}"))
                .help(format!("--mesh dp={ranks}")),
        ),
    }
}

/// Starts the backward pass from this rank's share of the loss, and makes the mean over all ranks the output.
///
/// # Errors
/// Not one scalar loss; a loss or a node that ranks cannot share ([`mean_of_examples`]).
pub fn weigh_loss(graph: &mut Graph, seeds: &mut [Seed], mesh: &Mesh) -> Result<()> {
    let [seed] = seeds else {
        return Err(
            fail("ranks share one loss, and the backward pass starts from several values")
                .help("name a loss with --loss"),
        );
    };
    let loss = seed.value;
    if !graph.is_output(loss) || graph.ty(loss).rank() != 0 {
        return Err(
            fail("ranks share a loss, and the backward pass does not start from one")
                .help("name a loss with --loss"),
        );
    }
    let mean = match has_groups(graph) {
        // Each rank may sort its own tokens by expert, so a copy without sorts is examined. Values have the same ids in it.
        true => {
            let mut unsorted = graph.clone();
            unsort(&mut unsorted)?;
            mean_of_examples(&unsorted, loss)?
        }
        false => mean_of_examples(graph, loss)?,
    };
    let name = graph.value(loss).name.clone();
    graph.rename_value(loss, &format!("{name}/own"));
    let group = || of_group(DATA_PARALLEL, mesh.dp);
    let mut b = Builder::new(graph);
    b.role = Role::Loss;
    b.prefix = "loss/ranks".into();
    let own = count(&mut b, mean)?;
    let all = b.emit(&ALL_REDUCE, &[own], group())?;
    let (zero, one) = (b.scalar(DType::F32, 0.0), b.scalar(DType::F32, 1.0));
    let some = b.op(MAX, &[all, one])?;
    let share = b.div(own, some)?;
    // The mean of no labels is NaN.
    let has_some = b.op(GREATER, &[own, zero])?;
    let wide = b.cast(loss, DType::F32)?;
    let sum = b.mul(wide, own)?;
    let sum = b.op(WHERE, &[has_some, sum, zero])?;
    let sum = b.emit(&ALL_REDUCE, &[sum], group())?;
    let mut total = b.div(sum, all)?;
    total = b.cast(total, b.dtype(loss))?;
    b.role = Role::Backward;
    let share = b.cast(share, b.dtype(loss))?;
    seed.cotangent = Some(match seed.cotangent {
        Some(scale) => b.mul(scale, share)?,
        None => share,
    });
    graph.rename_value(total, &name);
    let outputs = graph.outputs().iter();
    let outputs = outputs.map(|v| if *v == loss { total } else { *v });
    let outputs = outputs.collect();
    graph.set_outputs(outputs);
    Ok(())
}

/// Emits how many elements the mean of this rank is over, in float32.
fn count(b: &mut Builder, mean: Mean) -> Result<ValueId> {
    let (x, ignored) = match mean {
        Mean::Labels { labels, ignored } => (labels, ignored),
        Mean::Elements(x) => (x, None),
    };
    let Some(ignored) = ignored else {
        let size = b.op(SIZE, &[x])?;
        return b.cast(size, DType::F32);
    };
    let ignored = b.scalar_like(x, ignored as f64);
    let is_ignored = b.op(EQUAL, &[x, ignored])?;
    let counts = b.op(NOT, &[is_ignored])?;
    let counts = b.cast(counts, DType::F32)?;
    let attrs = Attrs::new().with("keepdims", 0);
    b.emit(REDUCE_SUM, &[counts], attrs)
}

/// Sums each gradient over ranks, right after it is complete. Zeros that stand for a gradient stay.
///
/// # Errors
/// A graph that sums them already.
pub fn reduce_gradients(graph: &mut Graph, mesh: &Mesh) -> Result<()> {
    let gradients = gradient_outputs(graph);
    let first = graph.order().len();
    let mut sums: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut after: Vec<(NodeId, NodeId)> = Vec::new();
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    b.role = Role::Backward;
    for gradient in gradients {
        let Some(maker) = b.graph.def_node(gradient) else {
            continue;
        };
        if is_zero_gradient(b.graph, gradient) {
            continue;
        }
        let name = b.graph.value(gradient).name.clone();
        b.graph.rename_value(gradient, &format!("{name}/own"));
        b.prefix = name.clone();
        let sum = b.emit(&ALL_REDUCE, &[gradient], of_group(DATA_PARALLEL, mesh.dp))?;
        b.graph.rename_value(sum, &name);
        sums.insert(gradient, sum);
        let node = b.graph.order()[first + after.len()];
        after.push((maker, node));
    }
    let outputs = graph.outputs().iter();
    let outputs = outputs.map(|v| sums.get(v).copied().unwrap_or(*v));
    let outputs = outputs.collect();
    graph.set_outputs(outputs);
    let mut behind: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
    for (maker, node) in after {
        behind.entry(maker.index()).or_default().push(node);
    }
    let order = graph.order()[..first].iter();
    let order = order.flat_map(|id| {
        let next = behind.remove(&id.index()).unwrap_or_default();
        std::iter::once(*id).chain(next)
    });
    let order = order.collect();
    graph.set_order(order);
    Ok(())
}
