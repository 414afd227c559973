//! Computes the head and the loss of a model part by part along its rows, so that the scores never exist whole.
//!
//! In and out: `Training`. The scores of all tokens against all classes are the widest tensor of a language model by far,
//! and they live where the backward begins, so no recomputation makes their peak smaller. But each row is on its own
//! from the head's product to the loss and back: the region around the scores is emitted once for every part of the
//! rows, forward and backward together, and what leaves it is put together: losses and weight gradients are added up,
//! 16-bit ones in float32; gradients of rows are joined. The nodes are ordinary ones, unrolled, so that the planner sees the
//! true peak and any runtime can run the file.
//!
//! Chains of ops on tokens in the middle of a model ([`tile_chains`]) are cut in the same way, but for their backward, which
//! runs later and reads what the forward nodes made of the same part: a planner may compute that again part by part.
//!
//! Works on any head whose ops treat rows alike (`ops/rows.rs`): with bias, soft caps, label smoothing, masks, class
//! weights, any reduction. Adding parts up rounds otherwise than one sum does.

mod chunks;
pub mod early;
pub mod region;

pub use region::{Refusal, Region};

use crate::analysis::sizes::Binding;
use crate::error::{Error, Result};
use crate::ir::op::OpClass;
use crate::ir::typing::Contents;
use crate::ir::{Builder, Dim, Graph, Node, NodeId, Role, SecondaryMap, ValueId};
use crate::ops::batch_axes::class_scores;
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::settle;
use crate::transform::simplify::simplify;
use chunks::Work;
use rustc_hash::FxHashMap;
use std::fmt;

/// Into how many parts rows are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tile {
    /// Nothing is tiled.
    #[default]
    Off,
    /// As many that the scores of a part are about as large as the activations they are made of, as Liger Kernel's fused linear
    /// cross entropy does (Hsu et al. 2024, arXiv 2410.10989).
    Auto,
    /// That many, so many times doubled; halved where negative.
    Doubled(i32),
    /// So many.
    Parts(usize),
}

/// What is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiles {
    /// Heads with their losses.
    pub loss: Tile,
    /// Chains of ops on tokens in the middle of a model, such as MLPs.
    pub mlp: Tile,
}

impl Tiles {
    /// Whether some number of parts is left open.
    pub fn is_open(&self) -> bool {
        self.loss == Tile::Auto || self.mlp == Tile::Auto
    }
}

impl Tile {
    /// Reads the value of `--tile-loss` or `--tile-mlp`.
    ///
    /// # Errors
    /// Another word, or a number below 1.
    pub fn parse(text: &str) -> Result<Tile> {
        match (text, text.parse::<usize>()) {
            ("off", _) => Ok(Tile::Off),
            ("auto", _) => Ok(Tile::Auto),
            (_, Ok(n)) if (1..=MOST_PARTS).contains(&n) => Ok(Tile::Parts(n)),
            _ => Err(
                Error::usage("tile", format!("rows cannot be cut into `{text}`"))
                    .expected(format!("off, auto or a number of parts up to {MOST_PARTS}")),
            ),
        }
    }

    /// How many parts a region is cut into at known sizes.
    pub fn parts(self, graph: &Graph, region: &Region, binding: &Binding) -> usize {
        match self {
            Tile::Off => 1,
            Tile::Parts(n) => n,
            Tile::Auto => ruled(graph, region, binding),
            Tile::Doubled(times) => {
                let rows = region.rows.eval(&|name| binding.get(name)).unwrap_or(1);
                let most = usize::try_from(rows).unwrap_or(1).clamp(1, MOST_PARTS);
                let (rule, factor) = (
                    ruled(graph, region, binding),
                    1 << times.unsigned_abs().min(10),
                );
                match times > 0 {
                    true => (rule * factor).min(most),
                    false => rule / factor,
                }
            }
        }
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tile::Off => f.write_str("off"),
            Tile::Auto => f.write_str("auto"),
            Tile::Doubled(times) => write!(f, "auto, doubled {times} times"),
            Tile::Parts(n) => write!(f, "{n}"),
        }
    }
}

/// The number of parts by the rule of [`Tile::Auto`].
fn ruled(graph: &Graph, region: &Region, binding: &Binding) -> usize {
    let Some(rows) = region.rows.eval(&|name| binding.get(name)) else {
        return 1;
    };
    let narrow = region.narrow_width(graph).max(1);
    let times = (region.width + narrow - 1) / narrow;
    let each = (rows.max(1) + times - 1) / times;
    let each = each.max(1) as u64;
    let parts = (rows.max(1) as u64).div_ceil(each.next_power_of_two());
    (parts as usize).min(MOST_PARTS)
}

/// Every part is a set of nodes of its own.
const MOST_PARTS: usize = 1024;

/// What the pass did, or why it did not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiled {
    /// Whether there is a loss over classes at all.
    pub found: bool,
    /// A tiled region each: the node that makes its scores, and how many parts it was cut into.
    pub regions: Vec<(String, usize)>,
    /// A line each for people: scores that stay whole, and why.
    pub refused: Vec<String>,
}

impl Tiled {
    /// The most parts that something was cut into; 1 where nothing was.
    pub fn most_parts(&self) -> usize {
        self.regions
            .iter()
            .map(|(_, parts)| *parts)
            .max()
            .unwrap_or(1)
    }
}

/// Cuts every region around scores of classes into the number of parts that `parts` says; 1 leaves it as it is.
///
/// # Errors
/// See [`infer`].
pub fn tile(graph: &mut Graph, parts: &dyn Fn(&Graph, &Region) -> usize) -> Result<Tiled> {
    let mut tiled = Tiled::default();
    let scores: Vec<_> = {
        let mut scores: Vec<_> = graph
            .order()
            .iter()
            .filter_map(|id| class_scores(graph.node(*id)))
            .collect();
        scores.sort_unstable();
        scores.dedup();
        scores
    };
    let heads = heads(graph);
    let named = scores.len();
    tiled.found = named + heads.len() > 0;
    let mut refused = Vec::new();
    for (i, scores) in scores.into_iter().chain(heads).enumerate() {
        // An earlier region may have held these.
        if !graph.contains_value(scores) {
            continue;
        }
        let contents = Contents::known(graph)?;
        let region = match Region::around(graph, &contents, scores) {
            Ok(region) => region,
            Err(refusal) => {
                let name = &graph.value(scores).name;
                let node = refusal
                    .node
                    .map_or(String::new(), |n| format!(" at {}", graph.describe(n)));
                let why = format!("scores `{name}` stay whole{node}: {}", refusal.why);
                // A product may be no head at all, and scores that a loss compares speak for it.
                if i < named || refused.is_empty() {
                    refused.push((scores, why));
                }
                continue;
            }
        };
        let count = parts(graph, &region);
        if count < 2 {
            continue;
        }
        let name = graph.describe(region.nodes[0]);
        let counts = apply(graph, &[(region, count)])?;
        tiled
            .regions
            .extend(counts.into_iter().map(|n| (name.clone(), n)));
    }
    // Scores may have been cut with others after all.
    refused.retain(|(scores, _)| graph.contains_value(*scores));
    tiled.refused = refused.into_iter().map(|(_, why)| why).collect();
    Ok(tiled)
}

/// Cuts chains of ops on tokens into the number of parts that `parts` says: what lies between a product that is wider than
/// what it reads and the next narrow value, with its backward. All parts run forward in the forward part; in the backward
/// part they follow one another again, so that what they hold in between can be computed anew part by part.
///
/// # Errors
/// See [`infer`].
pub fn tile_chains(graph: &mut Graph, parts: &dyn Fn(&Graph, &Region) -> usize) -> Result<Tiled> {
    let mut tiled = Tiled::default();
    let contents = Contents::known(graph)?;
    let heads = heads(graph);
    let mut regions: Vec<(Region, usize)> = Vec::new();
    let mut taken: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
    for id in graph.order() {
        let node = graph.node(*id);
        let expands = node.role == Role::Forward && expansion(graph, node).is_some();
        if !expands || taken[*id] || heads.contains(&node.outs[0]) {
            continue;
        }
        tiled.found = true;
        let region = match Region::chain(graph, &contents, node.outs[0]) {
            Ok(region) => region,
            Err(refusal) => {
                let node = refusal.node.unwrap_or(*id);
                let (wide, at) = (graph.describe(*id), graph.describe(node));
                tiled.refused.push(format!(
                    "what {wide} makes stays whole at {at}: {}",
                    refusal.why
                ));
                continue;
            }
        };
        let count = parts(graph, &region);
        if count < 2 || region.all().any(|n| taken[*n]) {
            continue;
        }
        for n in region.all() {
            taken[*n] = true;
        }
        regions.push((region, count));
    }
    if regions.is_empty() {
        return Ok(tiled);
    }
    let names: Vec<String> = regions
        .iter()
        .map(|(region, _)| graph.describe(region.nodes[0]))
        .collect();
    let counts = apply(graph, &regions)?;
    tiled.regions = names.into_iter().zip(counts).collect();
    Ok(tiled)
}

/// How many elements a row of the result of a product has, where it has more than its first operand.
fn expansion(graph: &Graph, node: &Node) -> Option<i64> {
    if !matches!(node.op.class, OpClass::Product | OpClass::BiasedProduct) {
        return None;
    }
    let width = |v: ValueId| graph.ty(v).dims.last().and_then(Dim::as_const);
    let (from, to) = (width((*node.ins.first()?)?)?, width(node.outs[0])?);
    (to > from).then_some(to)
}

/// Results of the last products before the loss, where they are wider than what they are made of: scores, in whatever
/// way the loss is written.
fn heads(graph: &Graph) -> Vec<ValueId> {
    let mut heads = Vec::new();
    let forward = |id: NodeId| graph.node(id).role != Role::Backward;
    let scalar = |v: &ValueId| graph.ty(*v).elements().is_one() && graph.ty(*v).dtype.is_float();
    let losses = graph.outputs().iter().copied().filter(scalar);
    let mut open: Vec<NodeId> = losses.filter_map(|v| graph.def_node(v)).collect();
    let mut seen = SecondaryMap::new(graph.node_bound(), false);
    while let Some(id) = open.pop() {
        if seen[id] || !forward(id) {
            continue;
        }
        seen[id] = true;
        let node = graph.node(id);
        if !matches!(node.op.class, OpClass::Product | OpClass::BiasedProduct) {
            open.extend(node.ins.iter().flatten().filter_map(|v| graph.def_node(*v)));
            continue;
        }
        if expansion(graph, node).is_some() {
            heads.push(node.outs[0]);
        }
    }
    heads.sort_unstable();
    heads
}

/// Puts the parts of regions, which share no node, in their places; returns how many parts each has.
fn apply(graph: &mut Graph, regions: &[(Region, usize)]) -> Result<Vec<usize>> {
    let contents = infer(graph)?;
    let old = graph.order().to_vec();
    let each = regions.iter();
    let work: Vec<Work> = each
        .map(|(region, count)| Work::new(graph, &contents, region, *count))
        .collect();
    let mut b = Builder::resume(graph, contents);
    let mut moved = FxHashMap::default();
    let mut instead: FxHashMap<NodeId, Vec<NodeId>> = FxHashMap::default();
    let mut counts = Vec::new();
    for ((region, _), work) in regions.iter().zip(&work) {
        let emitted = chunks::emit(&mut b, work, &mut moved)?;
        counts.push(emitted.parts);
        for (ids, new) in [&region.nodes, &region.after]
            .into_iter()
            .zip(emitted.nodes)
        {
            instead.extend(ids.first().map(|first| (*first, new)));
        }
    }
    let mut order = Vec::with_capacity(graph.order().len());
    let mut done: SecondaryMap<_, bool> = SecondaryMap::new(graph.node_bound(), false);
    for id in old {
        for id in instead.get(&id).into_iter().flatten() {
            settle(graph, *id, &mut done, &mut order)?;
        }
        settle(graph, id, &mut done, &mut order)?;
    }
    graph.set_order(order);
    dce(graph);
    simplify(graph)?;
    Ok(counts)
}
