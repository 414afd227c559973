//! Computes the head and the loss of a model chunk by chunk along its rows, so that the scores never exist whole.
//!
//! In and out: `Training`. The scores of all tokens against all classes are the widest tensor of a language model by far.
//! They live where the backward pass begins, so no recomputation lowers their peak. But each row is independent from the
//! head's product to the loss and back. The region around the scores is therefore emitted once for every chunk of the
//! rows, forward and backward together. Losses and weight gradients of the chunks are added up, 16-bit ones in float32;
//! gradients of rows are joined. The nodes are ordinary ones, unrolled, so that the planner sees the true peak and any
//! runtime can run the file.
//!
//! Chains of ops on tokens in the middle of a model ([`tile_chains`]) are cut in the same way. Their backward pass runs
//! later and reads what the forward nodes made of the same chunk, so a planner may recompute that chunk by chunk.
//!
//! A loss may compute something of whole sequences in between, such as a log-probability ratio. Then all chunks run forward
//! first and make what is narrow, such as log-probabilities of labels. The backward pass computes the scores of each chunk
//! again ([`MUST_RECOMPUTE`]), at the price of one more product with the head.
//!
//! Where rows are compared with something of all rows, such as the mean of each class over the batch, that is computed before: a
//! copy of the nodes that lead to it is a region of its own, and costs one more product with the head. Sinkhorn's iterations are
//! several such regions, one after the other.
//!
//! Works on any head whose ops treat rows alike (`ops/batch_axes.rs`): with bias, soft caps, label smoothing, masks, class
//! weights, any reduction. Rows are tokens or pixels, or examples where a loss mixes these. Sums over chunks round differently
//! from one sum.

mod chunks;
pub mod early;
mod heads;
pub mod region;
mod sink;

use region::{Early, ONE_ROW};
pub use region::{Refusal, Region};

use crate::analysis::loss_values::loss_side;
use crate::analysis::sizes::Binding;
use crate::error::{Error, Result};
use crate::ir::graph::MUST_RECOMPUTE;
use crate::ir::op::OpClass;
use crate::ir::typing::Contents;
use crate::ir::{Dim, Graph, Id, NodeId, Role, Same, SecondaryMap, ValueId};
use crate::ops::batch_axes::{axis_of, class_scores};
use crate::ops::shape::IDENTITY;
use crate::ops::softmax::LOG_SOFTMAX;
use crate::ops::{Builder, EmitExt};
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::{append_after_operands, order_by_reads};
use crate::transform::simplify::simplify;
use chunks::Snapshot;
use early::ease_reduction;
use heads::{expands, heads, is_product};
use rustc_hash::{FxHashMap, FxHashSet};
use sink::resume_at;
use std::fmt;

/// The number of chunks that rows are cut into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tile {
    /// Nothing is tiled.
    #[default]
    Off,
    /// As many that the scores of a chunk are about as large as the activations they are made of, as in Liger Kernel's
    /// fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989).
    Auto,
    /// The number of `Auto`, doubled so many times; halved where negative.
    Doubled(i32),
    /// A fixed number.
    Chunks(usize),
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
    /// Returns true if the planner chooses some number of chunks.
    pub fn is_open(&self) -> bool {
        self.loss == Tile::Auto || self.mlp == Tile::Auto
    }
}

impl Tile {
    /// Parses the value of `--tile-loss` or `--tile-mlp`.
    ///
    /// # Errors
    /// Another word, or a number below 1.
    pub fn parse(text: &str) -> Result<Tile> {
        match (text, text.parse::<usize>()) {
            ("off", _) => Ok(Tile::Off),
            ("auto", _) => Ok(Tile::Auto),
            (_, Ok(n)) if (1..=MAX_CHUNKS).contains(&n) => Ok(Tile::Chunks(n)),
            _ => Err(
                Error::usage("tile", format!("rows cannot be cut into `{text}`")).expected(
                    format!("off, auto or a number of chunks up to {MAX_CHUNKS}"),
                ),
            ),
        }
    }

    /// Parses the value of `--tile-loss`, which may also be `required`: `auto`, and scores that have to stay whole are an error.
    ///
    /// # Errors
    /// Those of [`Tile::parse`].
    pub fn parse_loss(text: &str) -> Result<(Tile, bool)> {
        match text {
            "required" => Ok((Tile::Auto, true)),
            _ => Ok((Tile::parse(text)?, false)),
        }
    }

    /// Returns the number of chunks that a region is cut into at known sizes.
    pub fn chunks(self, graph: &Graph, region: &Region, binding: &Binding) -> usize {
        match self {
            Tile::Off => 1,
            Tile::Chunks(n) => n,
            Tile::Auto => auto_chunks(graph, region, binding),
            Tile::Doubled(times) => {
                let rows = region.rows.eval(&|name| binding.get(name)).unwrap_or(1);
                let most = usize::try_from(rows).unwrap_or(1).clamp(1, MAX_CHUNKS);
                let factor = 1 << times.unsigned_abs().min(10);
                let auto = auto_chunks(graph, region, binding);
                match times > 0 {
                    true => (auto * factor).min(most),
                    false => auto / factor,
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
            Tile::Chunks(n) => write!(f, "{n}"),
        }
    }
}

/// Returns the number of chunks by the rule of [`Tile::Auto`].
fn auto_chunks(graph: &Graph, region: &Region, binding: &Binding) -> usize {
    let Some(rows) = region.rows.eval(&|name| binding.get(name)) else {
        return 1;
    };
    let narrow = region.narrow_width(graph).max(1);
    let width = region.width.eval(&|name| binding.get(name)).unwrap_or(1);
    let times = ((width + narrow - 1) / narrow).max(1);
    let each = (rows.max(1) + times - 1) / times;
    let each = each.max(1) as u64;
    let chunks = (rows.max(1) as u64).div_ceil(each.next_power_of_two());
    (chunks as usize).min(MAX_CHUNKS)
}

/// Most chunks: each one is a set of nodes of its own.
const MAX_CHUNKS: usize = 1024;

/// Most second names, and most operands that are computed before, that are tried for the sake of one region.
const MOST_SPLITS: usize = 64;

/// What the pass did, or why it did not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiled {
    /// There is something that could be tiled: a loss over classes, or a chain.
    pub found: bool,
    /// Each tiled region: the node that makes its scores, and the number of chunks.
    pub regions: Vec<(String, usize)>,
    /// One line for people per value that stays whole, with the reason.
    pub refused: Vec<String>,
    /// Reductions were rewritten or dead nodes dropped, even if nothing was tiled then.
    pub rewritten: bool,
}

impl Tiled {
    /// Returns the most chunks of a region; 1 where nothing was tiled.
    pub fn most_chunks(&self) -> usize {
        let counts = self.regions.iter().map(|(_, chunks)| *chunks);
        counts.max().unwrap_or(1)
    }
}

/// Cuts every region around scores of classes into the number of chunks that `chunks` returns; 1 leaves it as it is.
///
/// # Errors
/// See [`infer`].
pub fn tile(graph: &mut Graph, chunks: &dyn Fn(&Graph, &Region) -> usize) -> Result<Tiled> {
    // Later on only copies may be dropped, so that what is not cut is not changed.
    let rewritten = dce(graph);
    let order = graph.order().iter();
    let scores = order.filter_map(|id| class_scores(graph.node(*id)));
    let mut scores: Vec<ValueId> = scores.collect();
    scores.sort_unstable();
    scores.dedup();
    let heads = heads(graph);
    let named = scores.len();
    let mut tiled = Tiled {
        found: named + heads.len() > 0,
        rewritten,
        ..Tiled::default()
    };
    let mut refused: Vec<Refused> = Vec::new();
    // The sizes of chunks.
    let mut cut: Vec<Dim> = Vec::new();
    // The sizes of scores that were cut.
    let mut whole: Vec<Vec<Dim>> = Vec::new();
    let heads: Vec<ValueId> = heads.into_iter().filter(|v| !scores.contains(v)).collect();
    let mut open: Vec<(usize, ValueId)> = scores.into_iter().chain(heads).enumerate().collect();
    let mut names = Vec::new();
    let mut tried: FxHashSet<ValueId> = FxHashSet::default();
    // What cutting makes is not cut again.
    let given = graph.value_bound();
    loop {
        if open.is_empty() && !stay_whole(graph, &refused, &whole) {
            let more = alike(graph, &whole).into_iter();
            let more = more.filter(|v| v.index() < given && !tried.contains(v));
            open = more.map(|v| (usize::MAX, v)).collect();
        }
        if open.is_empty() {
            break;
        }
        tried.extend(open.iter().map(|(_, scores)| *scores));
        let mut contents = Contents::known(graph)?;
        // Regions that share no node are cut at once.
        let mut regions: Vec<(Region, usize)> = Vec::new();
        let mut taken: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        let mut later = Vec::new();
        for (i, scores) in std::mem::take(&mut open) {
            // An earlier region may have contained these.
            if !graph.contains_value(scores) {
                continue;
            }
            if graph.def_node(scores).is_some_and(|maker| taken[maker]) {
                later.push((i, scores));
                continue;
            }
            let mut found;
            let eased = &mut tiled.rewritten;
            (found, contents) = find(graph, contents, scores, true, &taken, eased)?;
            if found.is_err() {
                let strict;
                (strict, contents) = find(graph, contents, scores, false, &taken, eased)?;
                found = strict.or(found);
            }
            let (region, help) = match found {
                Ok(found) => found,
                // The cuts of this round may change that.
                Err(_) if !regions.is_empty() => {
                    later.push((i, scores));
                    continue;
                }
                Err(refusal) => {
                    let name = &graph.value(scores).name;
                    let node = refusal.node.map(|n| format!(" at {}", graph.describe(n)));
                    let node = node.unwrap_or_default();
                    let why = format!("scores `{name}` stay whole{node}: {}", refusal.why);
                    // One says it of what is around it.
                    if i < usize::MAX || !stay_whole(graph, &refused, &whole) {
                        refused.push((scores, why, i < named && refusal.why != ONE_ROW));
                    }
                    continue;
                }
            };
            if region.all().any(|n| taken[*n]) {
                contents = help.undo(graph, contents)?;
                later.push((i, scores));
                continue;
            }
            let count = chunks(graph, &region);
            if count < 2 {
                contents = help.undo(graph, contents)?;
            } else {
                names.extend(help.names);
                // What is there before has regions of its own.
                later.extend(help.again.into_iter().map(|again| (i, again.wide)));
                let all = graph.ty(scores).elements();
                cut.push(all.div(&Dim::from(count as i64)));
                whole.push(graph.ty(scores).dims.to_vec());
                region.all().for_each(|n| taken[*n] = true);
                regions.push((region, count));
            }
        }
        if !regions.is_empty() {
            let first = |(region, _): &(Region, usize)| graph.describe(region.nodes[0]);
            let makers: Vec<String> = regions.iter().map(first).collect();
            let counts = apply(graph, &regions, true)?;
            tiled.regions.extend(makers.into_iter().zip(counts));
        }
        open = later;
    }
    unite(graph, &names);
    // A later region may have contained scores that were refused. Those that are no larger than a chunk of others may be whole.
    // A product may be no head at all; scores that a loss compares are one, and what is as large as those.
    let size = |v: &ValueId| graph.ty(*v).elements();
    refused.retain(|(scores, ..)| {
        graph.contains_value(*scores) && !cut.iter().any(|chunk| at_least(chunk, &size(scores)))
    });
    let compared = refused.iter().filter(|(.., is_named)| *is_named);
    whole.extend(compared.map(|(v, ..)| graph.ty(*v).dims.to_vec()));
    let is_only = whole.is_empty();
    let is_told = |(i, (v, _, is_named)): &(usize, Refused)| {
        *is_named || is_as_large(graph, *v, &whole) || (is_only && *i == 0)
    };
    let refused = refused.into_iter().enumerate().filter(is_told);
    tiled.refused = refused.map(|(_, (_, why, _))| why).collect();
    Ok(tiled)
}

/// Scores that stay whole, with the reason for people, and whether a loss compares them.
type Refused = (ValueId, String, bool);

fn at_least(a: &Dim, b: &Dim) -> bool {
    a.sub(b).bounds().0 >= Some(0)
}

/// Returns true for a value that is as large as one of these sizes.
fn is_as_large(graph: &Graph, v: ValueId, sizes: &[Vec<Dim>]) -> bool {
    let size = graph.ty(v).elements();
    let mut sizes = sizes.iter();
    sizes.any(|dims| at_least(&size, &Dim::product(dims)))
}

/// Returns true if some of these stay whole and are as large as what was cut.
fn stay_whole(graph: &Graph, refused: &[Refused], cut: &[Vec<Dim>]) -> bool {
    let mut there = refused.iter().filter(|(v, ..)| graph.contains_value(*v));
    there.any(|(v, ..)| is_as_large(graph, *v, cut))
}

/// Returns the values of the loss side that are as large as scores of these sizes, row by row: only something narrow connects them with
/// the scores, such as the numbers of the surest classes with labels that are made of these, or with cotangents of the few scores
/// that a loss reads.
fn alike(graph: &Graph, scores: &[Vec<Dim>]) -> Vec<ValueId> {
    let is_like = |dims: &[Dim], scores: &[Dim]| {
        let ends = dims.last().zip(scores.last());
        ends.is_some_and(|(a, b)| a.same(b) == Same::Yes)
            && Dim::product(dims).same(&Dim::product(scores)) == Same::Yes
    };
    let is_alike = |v: &ValueId| scores.iter().any(|s| is_like(&graph.ty(*v).dims, s));
    let is_made = |v: &ValueId| {
        graph
            .def_node(*v)
            .is_some_and(|id| !is_product(graph.node(id)))
    };
    let values = loss_side(graph).into_iter();
    values.filter(|v| is_alike(v) && is_made(v)).collect()
}

/// The region around scores and what it needs.
type Found = std::result::Result<(Region, Help), Refusal>;

/// Nodes that let a region exist.
#[derive(Default)]
struct Help {
    /// Second names of values.
    names: Vec<ValueId>,
    /// What is computed before, in the order it was found.
    again: Vec<Again>,
    /// Operands that were replaced by results of these, each with what it was.
    moved: Vec<(NodeId, usize, ValueId)>,
    /// How many reductions were rewritten, which is not taken back.
    eased: usize,
}

impl Help {
    /// Takes names and copies away again. Returns what is known of contents then.
    fn undo(self, graph: &mut Graph, contents: Contents) -> Result<Contents> {
        for (node, slot, old) in self.moved.iter().rev() {
            graph.set_operand(*node, *slot, Some(*old));
        }
        unite(graph, &self.names);
        if self.names.is_empty() && self.again.is_empty() {
            return Ok(contents);
        }
        dce(graph);
        Contents::known(graph)
    }
}

/// Something narrow that is read for all rows, computed again from the first wide value on.
struct Again {
    old: ValueId,
    new: ValueId,
    /// The new wide value.
    wide: ValueId,
}

/// Searches the region around scores. Where the search fails, adds second names and copies of nodes, and searches again. Returns
/// the region or the last refusal, and what is known of contents then.
fn find(
    graph: &mut Graph,
    mut contents: Contents,
    scores: ValueId,
    halves: bool,
    taken: &SecondaryMap<NodeId, bool>,
    rewritten: &mut bool,
) -> Result<(Found, Contents)> {
    let classes = classes_axis(graph, scores);
    let mut help = Help::default();
    loop {
        let refusal = match Region::around(graph, &contents, scores, classes, halves) {
            Ok(region) => return Ok((Ok((region, help)), contents)),
            Err(refusal) => refusal,
        };
        let is_taken = |id: &NodeId| taken[*id];
        match (refusal.to_split(), &refusal.early) {
            (Some((node, slots)), _) if !taken[node] && help.names.len() < MOST_SPLITS => {
                let name;
                (name, contents) = split(graph, contents, node, slots)?;
                help.names.push(name);
            }
            (None, Some(early))
                if help.moved.len() < MOST_SPLITS
                    && !early.nodes.iter().any(is_taken)
                    && !early.readers.iter().any(|(id, _)| is_taken(id)) =>
            {
                contents = compute_before(graph, contents, early, &mut help)?;
            }
            _ => {
                let node = refusal
                    .node
                    .filter(|id| !taken[*id] && help.eased < MOST_SPLITS);
                if let Some(id) = node {
                    let is_eased;
                    (is_eased, contents) = ease_reduction(graph, contents, id)?;
                    help.eased += 1;
                    *rewritten |= is_eased;
                    if is_eased {
                        continue;
                    }
                }
                let contents = help.undo(graph, contents)?;
                return Ok((Err(refusal), contents));
            }
        }
    }
}

/// Emits the nodes that lead to a value once more, if that is not done yet, and has its readers read the new one. Returns what is
/// known of contents then.
fn compute_before(
    graph: &mut Graph,
    contents: Contents,
    early: &Early,
    help: &mut Help,
) -> Result<Contents> {
    let order = graph.order().to_vec();
    let mut b = Builder::resume(graph, contents);
    if !help.again.iter().any(|again| again.old == early.value) {
        let mut new: FxHashMap<ValueId, ValueId> = FxHashMap::default();
        for id in &early.nodes {
            let node = resume_at(&mut b, *id);
            let renamed = |v: &Option<ValueId>| v.map(|v| new.get(&v).copied().unwrap_or(v));
            let ins = node.ins.iter().map(renamed).collect();
            let outs = b.emit_n(node.op, ins, node.attrs.clone(), node.outs.len())?;
            new.extend(node.outs.iter().copied().zip(outs));
        }
        help.again.push(Again {
            old: early.value,
            new: new[&early.value],
            wide: new[&early.wide],
        });
    }
    let contents = b.contents;
    let again = help.again.iter().find(|again| again.old == early.value);
    for (node, slot) in &early.readers {
        graph.set_operand(*node, *slot, again.map(|again| again.new));
        help.moved.push((*node, *slot, early.value));
    }
    order_by_reads(graph, &order)?;
    Ok(contents)
}

/// Has a node read an `Identity` of the value that it reads in `slots`: a second name. A matrix of rows that is compared with
/// itself is read row by row on one side, and whole on the other. Returns the name, and what is known of contents with it.
fn split(
    graph: &mut Graph,
    contents: Contents,
    node: NodeId,
    slots: &[usize],
) -> Result<(ValueId, Contents)> {
    let order = graph.order().to_vec();
    let v = graph.node(node).ins[slots[0]].ok_or_else(|| Error::bug("tile", "no operand"))?;
    let mut b = Builder::resume(graph, contents);
    let reader = b.graph.node(node);
    (b.prefix, b.loc, b.role) = (reader.name.clone(), reader.loc.clone(), reader.role);
    let name = b.op(&IDENTITY, &[v])?;
    let contents = b.contents;
    for slot in slots {
        graph.set_operand(node, *slot, Some(name));
    }
    order_by_reads(graph, &order)?;
    Ok((name, contents))
}

/// Takes second names away.
fn unite(graph: &mut Graph, names: &[ValueId]) {
    for name in names {
        let is_there = graph.contains_value(*name);
        let maker = is_there.then(|| graph.def_node(*name)).flatten();
        if let Some(v) = maker.and_then(|id| graph.node(id).operand(0)) {
            graph.replace_uses(*name, v);
        }
    }
    if !names.is_empty() {
        dce(graph);
    }
}

/// Cuts chains of ops on tokens into the number of chunks that `chunks` returns. A chain leads from a product that is
/// wider than its operand to the next narrow value, with its backward nodes. All chunks run forward in the forward pass.
/// In the backward pass they follow one another again, so that what they keep in between can be recomputed chunk by chunk.
///
/// # Errors
/// See [`infer`].
pub fn tile_chains(graph: &mut Graph, chunks: &dyn Fn(&Graph, &Region) -> usize) -> Result<Tiled> {
    let mut tiled = Tiled::default();
    let contents = Contents::known(graph)?;
    let heads = heads(graph);
    let mut regions: Vec<(Region, usize)> = Vec::new();
    let mut taken: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
    for id in graph.order() {
        let node = graph.node(*id);
        let expands = node.role == Role::Forward
            && node.op.class != OpClass::Convolution
            && expands(graph, node);
        if !expands || taken[*id] || heads.contains(&node.outs[0]) {
            continue;
        }
        tiled.found = true;
        let region = match Region::chain(graph, &contents, node.outs[0]) {
            Ok(region) if !region.narrows(graph) => {
                let wide = graph.describe(*id);
                let line =
                    format!("what {wide} makes stays whole: what is read of it later is as large");
                tiled.refused.push(line);
                continue;
            }
            Ok(region) => region,
            Err(refusal) => {
                let node = refusal.node.unwrap_or(*id);
                let (wide, at) = (graph.describe(*id), graph.describe(node));
                let why = refusal.why;
                let line = format!("what {wide} makes stays whole at {at}: {why}");
                tiled.refused.push(line);
                continue;
            }
        };
        let count = chunks(graph, &region);
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
    let first = |(region, _): &(Region, usize)| graph.describe(region.nodes[0]);
    let names: Vec<String> = regions.iter().map(first).collect();
    let counts = apply(graph, &regions, false)?;
    tiled.regions = names.into_iter().zip(counts).collect();
    Ok(tiled)
}

/// Returns the axis of scores that is the classes: the last one, or the second where a loss over classes or a convolution has
/// it there.
fn classes_axis(graph: &Graph, scores: ValueId) -> usize {
    let rank = graph.ty(scores).rank();
    let maker = graph.def_node(scores).map(|id| graph.node(id));
    let is_conv = maker.is_some_and(|node| node.op.class == OpClass::Convolution);
    let mut readers = graph
        .value(scores)
        .uses()
        .iter()
        .map(|u| graph.node(u.node));
    let named = readers.find(|node| class_scores(node) == Some(scores));
    let last = rank.saturating_sub(1);
    match named {
        Some(node) if node.op == &LOG_SOFTMAX => axis_of(node, rank),
        Some(_) => last.min(1),
        None if is_conv => last.min(1),
        None => last,
    }
}

/// Replaces regions, which share no node, by their chunks. With `again`, backward nodes that run later may not read wide
/// results from the forward pass. Returns the number of chunks of each.
fn apply(graph: &mut Graph, regions: &[(Region, usize)], again: bool) -> Result<Vec<usize>> {
    let contents = infer(graph)?;
    let old = graph.order().to_vec();
    let each = regions.iter();
    let snapshots: Vec<Snapshot> = each
        .map(|(region, count)| Snapshot::new(graph, &contents, region, *count))
        .collect();
    let mut b = Builder::resume(graph, contents);
    let mut moved = FxHashMap::default();
    let mut replaced: FxHashMap<NodeId, Vec<NodeId>> = FxHashMap::default();
    let mut counts = Vec::new();
    for ((region, _), snapshot) in regions.iter().zip(&snapshots) {
        let emitted = chunks::emit(&mut b, snapshot, &mut moved)?;
        for id in emitted.wide.iter().filter(|_| again) {
            let notes = b.graph.meta_mut(*id);
            notes.insert(MUST_RECOMPUTE.into(), "too wide".into());
        }
        counts.push(emitted.chunks);
        let sides = [&region.nodes, &region.after].into_iter();
        for (ids, new) in sides.zip(emitted.nodes) {
            replaced.extend(ids.first().map(|first| (*first, new)));
        }
    }
    let mut order = Vec::with_capacity(graph.order().len());
    let mut done: SecondaryMap<_, bool> = SecondaryMap::new(graph.node_bound(), false);
    for id in old {
        let new = replaced.get(&id).into_iter().flatten();
        for next in new.chain([&id]) {
            append_after_operands(graph, *next, &mut done, &mut order)?;
        }
    }
    graph.set_order(order);
    dce(graph);
    simplify(graph)?;
    Ok(counts)
}
