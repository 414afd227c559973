//! Computes the head and the loss of a model part by part along its rows, so that the scores never exist whole.
//!
//! In and out: `Training`. The scores of all tokens against all classes are the widest tensor of a language model by far,
//! and they live where the backward begins, so no recomputation makes their peak smaller. But each row is on its own
//! from the head's product to the loss and back: the region around the scores is emitted once for every part of the
//! rows, forward and backward together, and what leaves it is put together: losses and weight gradients are added up,
//! 16-bit ones in float32; gradients of rows are joined. The nodes are ordinary ones, unrolled, so that the planner sees the
//! true peak and any runtime can run the file.
//!
//! Works on any head whose ops treat rows alike (`ops/rows.rs`): with bias, soft caps, label smoothing, masks, class
//! weights, any reduction. Adding parts up rounds otherwise than one sum does.

mod parts;
pub mod region;

pub use region::{Refusal, Region};

use crate::analysis::sizes::Binding;
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Graph, Side};
use crate::ops::rows::class_scores;
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::settle;
use crate::transform::simplify::simplify;
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

impl Tile {
    /// Reads the value of `--tile-loss`.
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
    tiled.found = !scores.is_empty();
    for scores in scores {
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
                tiled
                    .refused
                    .push(format!("scores `{name}` stay whole{node}: {}", refusal.why));
                continue;
            }
        };
        let count = parts(graph, &region);
        if count < 2 {
            continue;
        }
        let name = graph.describe(region.nodes[0]);
        let count = apply(graph, &region, count)?;
        tiled.regions.push((name, count));
    }
    Ok(tiled)
}

/// Puts the parts of a region in its place; returns how many there are.
fn apply(graph: &mut Graph, region: &Region, count: usize) -> Result<usize> {
    let contents = infer(graph)?;
    let old = graph.order().to_vec();
    let count = parts::emit(graph, contents, region, count)?;
    let new = graph.order()[old.len()..].to_vec();
    let mut order = Vec::with_capacity(graph.order().len());
    let mut done: Side<_, bool> = Side::new(graph.node_bound(), false);
    for id in old {
        if id == region.nodes[0] {
            for id in &new {
                settle(graph, *id, &mut done, &mut order)?;
            }
        }
        settle(graph, id, &mut done, &mut order)?;
    }
    graph.set_order(order);
    dce(graph);
    simplify(graph)?;
    Ok(count)
}
