//! How ops treat the positions of a sequence, which lie along one axis of a value.
//!
//! If the place of the positions in some operands or in a result of a node is known, [`positions`] returns what the node
//! reads for some of the positions, and where they lie in its results. Unlike rows ([`fit`](super::fit)), positions keep
//! their axis, so batch axes and heads stay apart from them. Causal attention mixes positions, but only with earlier
//! ones: for some queries it reads the keys up to the last of them.
//!
//! The examples of a batch lie along one axis in the same way ([`examples_apart`]).

use super::super::attention::{ATTENTION, SEGMENTS};
use super::super::concat::{CONCAT, PAD, SPLIT, TILE};
use super::super::conv::{CONV, CONV_TRANSPOSE};
use super::super::fill::{CONSTANT_OF_SHAPE, RANGE, TRILU};
use super::super::grouped::GROUPED_MATMUL;
use super::super::index::{GATHER, GATHER_ND};
use super::super::loss::is_class_weight;
use super::super::norm::{LAYER_NORM, RMS_NORM};
use super::super::piecewise::PRELU;
use super::super::pool::MAX_POOL;
use super::super::random::DROPOUT;
use super::super::reduce::{REDUCE_MEAN, REDUCE_SUM};
use super::super::rotary::ROTARY;
use super::super::scan::CUM_SUM;
use super::super::scatter::SCATTER_ND;
use super::super::select::{ARG_MAX, ARG_MIN};
use super::super::slice::STEPS;
use super::{Reason, axis_of, from_start, permutation, reduced_axes, sliced_axes};
use ckpt_ir::op::{BatchAxes, Effect};
use ckpt_ir::typing::Contents;
use ckpt_ir::{DType, Dim, Graph, Node, NodeId, Same, ValueId};

/// Where the positions of a sequence lie in a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The axis. Its size is `outer·len·inner`.
    pub axis: usize,
    /// The size of what was merged into the axis before the positions.
    pub outer: Dim,
    /// The number of positions.
    pub len: Dim,
    /// The size of what was merged into the axis behind the positions.
    pub inner: Dim,
}

impl Place {
    /// Returns the place of `len` positions that have an axis of their own.
    pub fn own_axis(axis: usize, len: Dim) -> Place {
        let (outer, inner) = (Dim::ONE, Dim::ONE);
        Place {
            axis,
            outer,
            len,
            inner,
        }
    }

    /// Returns the size of the axis with `len` positions.
    pub fn size(&self, len: &Dim) -> Dim {
        self.outer.mul(len).mul(&self.inner)
    }

    /// Returns true if nothing was merged into the axis.
    pub fn is_own_axis(&self) -> bool {
        self.outer.is_one() && self.inner.is_one()
    }

    fn at(&self, axis: usize) -> Place {
        Place {
            axis,
            ..self.clone()
        }
    }
}

/// What a node reads of an operand for some of the positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it: it is the same for all positions.
    Whole,
    /// The same positions.
    Chunk(Place),
    /// The positions up to the last one, from so many before the first one on; from the start on where that is `None`.
    Prefix(Place, Option<i64>),
    /// The same positions along one axis, and those that attention reads as a prefix along another; `None` where it has
    /// one element there.
    Mask {
        /// The place of the queries.
        rows: Option<Place>,
        /// The place of the keys.
        columns: Option<(Place, Option<i64>)>,
    },
    /// A list of sizes, which the emission of the node makes itself.
    Sizes,
}

/// What a node makes of some positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Positions {
    /// What it reads of each operand.
    pub ins: Vec<Part>,
    /// Where the positions lie in each result; `None`: the result is a sum over positions.
    pub outs: Vec<Option<Place>>,
}

/// What [`positions`] looks at.
pub struct PositionsCx<'a> {
    /// The graph of the node.
    pub graph: &'a Graph,
    /// Known contents of small integer values.
    pub contents: &'a Contents,
    /// Where positions lie in an operand, as far as is known.
    pub place: &'a dyn Fn(ValueId) -> Option<Place>,
    /// Whether the bias of an attention is proven to hide every key behind the query.
    pub has_causal_bias: &'a dyn Fn(NodeId) -> bool,
}

const MIXED: Reason = "it mixes positions";
const NO_RULE: Reason = "there is no rule for how it treats positions";

type Fitted = Result<Positions, Reason>;

/// Returns how a node treats positions. If `wanted` gives their place in the first result, the operands follow from it;
/// else the results follow from the operands.
///
/// # Errors
/// Why the node cannot be computed for some of the positions.
pub fn positions(cx: &PositionsCx, id: NodeId, wanted: Option<&Place>) -> Fitted {
    let node = cx.graph.node(id);
    if node.op == &DROPOUT && wanted.is_none() {
        let place = (cx.place)(operand(node, 0)?).ok_or(MIXED)?;
        return Ok(one(node, of_first(node, &place), place));
    }
    if node.op.effect == Effect::Seeded {
        return Err("it draws random numbers for all positions at once");
    }
    if node.op.effect != Effect::Pure || node.outs.is_empty() {
        return Err(NO_RULE);
    }
    let op = node.op;
    match op.axes {
        BatchAxes::Pointwise => aligned(cx, node, wanted),
        BatchAxes::Broadcast => expanded(cx, node, wanted),
        BatchAxes::Regrouped => regrouped(cx, node, wanted),
        BatchAxes::Permuted => permuted(cx, node, wanted),
        BatchAxes::Product => product(cx, node, wanted),
        BatchAxes::BiasedProduct => biased_product(cx, node, wanted),
        BatchAxes::Reduced => reduced(cx, node, wanted),
        BatchAxes::Sliced => sliced(cx, node, wanted),
        BatchAxes::AlongAxis => along(cx, node, wanted, node.attrs.int("axis")),
        BatchAxes::ClassLoss | BatchAxes::EachClassLoss => class_loss(cx, node),
        BatchAxes::OneHot => one_hot(cx, node, wanted),
        BatchAxes::SummedToShape | BatchAxes::ClassLossGrad | BatchAxes::Mixed => {
            mixed(cx, id, wanted)
        }
    }
}

/// Checks that processes can each run a node on their own examples: no result mixes them. At least one operand has a place; `count` is the number of examples. Returns their place in each result.
///
/// # Errors
/// Why it mixes them, or that there is no rule for the op.
pub fn examples_apart(cx: &PositionsCx, id: NodeId, count: &Dim) -> Result<Vec<Place>, Reason> {
    const MIXED: Reason = "it mixes the examples of a batch";
    let node = cx.graph.node(id);
    if node.op.effect == Effect::Seeded {
        return Err("it would draw the same numbers for the examples of each process");
    }
    let found = positions(cx, id, None).map_err(|why| match why == NO_RULE {
        true => "there is no rule for how it treats the examples of a batch",
        false => MIXED,
    })?;
    for (v, part) in node.ins.iter().zip(&found.ins) {
        match (v.and_then(cx.place), part) {
            (None, Part::Whole | Part::Sizes) => {}
            (Some(place), Part::Chunk(read)) if place == *read => {}
            (Some(_), Part::Chunk(_)) => return Err("its operands have examples at other places"),
            _ => return Err(MIXED),
        }
    }
    let outs = found.outs.into_iter().map(|place| place.ok_or(MIXED));
    let outs = outs.collect::<Result<Vec<Place>, Reason>>()?;
    match outs.iter().all(|place| place.len == *count) {
        true => Ok(outs),
        false => Err("it drops or adds examples"),
    }
}

/// Ops whose field `axes` gives no rule.
fn mixed(cx: &PositionsCx, id: NodeId, wanted: Option<&Place>) -> Fitted {
    let node = cx.graph.node(id);
    let is = |ops: &[&'static ckpt_ir::OpDef]| ops.contains(&node.op);
    if is(&[&PRELU, &ROTARY]) {
        return aligned(cx, node, wanted);
    }
    if is(&[&CONCAT, &SPLIT, &ARG_MAX, &ARG_MIN]) {
        return along(cx, node, wanted, node.attrs.int("axis"));
    }
    if is(&[&CUM_SUM]) {
        let axis = node.operand(1).and_then(|v| cx.contents.get(v));
        let axis = axis.and_then(|ints| ints.first()?.as_const());
        return along(cx, node, wanted, axis.ok_or("its axis is not a constant")?);
    }
    if is(&[&TRILU]) {
        let x = operand(node, 0)?;
        let place = wanted_or_of(cx, wanted, x)?;
        return match place.axis + 2 < cx.graph.ty(x).rank() {
            true => Ok(one(node, of_first(node, &place), place)),
            false => Err("it works along the positions"),
        };
    }
    if is(&[&CONV, &CONV_TRANSPOSE, &MAX_POOL]) {
        // The second result of a pool numbers places in the whole operand.
        let is_read = |v: &ValueId| cx.graph.is_output(*v) || !cx.graph.value(*v).uses().is_empty();
        if node.outs.get(1).is_some_and(is_read) {
            return Err(MIXED);
        }
        let place = wanted_or_of(cx, wanted, operand(node, 0)?)?;
        return match place.axis {
            0 => Ok(one(node, of_first(node, &place), place)),
            _ => Err("it works along the positions"),
        };
    }
    if is(&[&LAYER_NORM, &RMS_NORM]) {
        return normalised(cx, node, wanted);
    }
    if is(&[&ATTENTION]) {
        return attention(cx, id);
    }
    if is(&[&GROUPED_MATMUL]) {
        let place = wanted_or_of(cx, wanted, operand(node, 0)?)?;
        let ins = [
            Part::Chunk(place.clone()),
            Part::Whole,
            Part::Chunk(place.clone()),
        ];
        return match place.axis {
            0 => Ok(one(node, ins.into(), place)),
            _ => Err("a product sums over positions"),
        };
    }
    if is(&[&GATHER]) {
        return gathered(cx, node, wanted);
    }
    if is(&[&GATHER_ND]) {
        return picked(cx, node, wanted);
    }
    if is(&[&SCATTER_ND]) {
        return scattered(cx, node, wanted);
    }
    if is(&[&PAD, &TILE]) {
        return padded(cx, node, wanted);
    }
    if is(&[&CONSTANT_OF_SHAPE]) {
        let place = wanted.ok_or(MIXED)?;
        return Ok(one(node, vec![Part::Sizes], place.clone()));
    }
    if is(&[&RANGE]) {
        let place = wanted.filter(|p| p.is_own_axis()).ok_or(MIXED)?;
        let number = |slot: usize| {
            let ints = node.operand(slot).and_then(|v| cx.contents.get(v));
            ints.and_then(|ints| ints.first()?.as_const())
        };
        let is_i64 = cx.graph.ty(node.outs[0]).dtype == DType::I64;
        return match (number(0), number(2)) {
            (Some(_), Some(1)) if is_i64 => Ok(one(node, vec![Part::Sizes; 3], place.clone())),
            _ => Err("its first number and its step are not constants"),
        };
    }
    Err(NO_RULE)
}

/// Returns the place that is wanted, or else that of an operand which a result has, too.
fn wanted_or_of(cx: &PositionsCx, wanted: Option<&Place>, x: ValueId) -> Result<Place, Reason> {
    wanted.cloned().or_else(|| (cx.place)(x)).ok_or(MIXED)
}

/// Only the first operand has positions, at this place.
fn of_first(node: &Node, place: &Place) -> Vec<Part> {
    let mut ins = vec![Part::Whole; node.ins.len()];
    ins[0] = Part::Chunk(place.clone());
    ins
}

/// All results have the positions at one place.
fn one(node: &Node, ins: Vec<Part>, place: Place) -> Positions {
    let outs = vec![Some(place); node.outs.len()];
    Positions { ins, outs }
}

fn dims(cx: &PositionsCx, v: ValueId) -> Vec<Dim> {
    cx.graph.ty(v).dims.clone()
}

fn is_size(dim: &Dim, place: &Place) -> bool {
    dim.same(&place.size(&place.len)) == Same::Yes
}

/// Returns the first operand with a place, and the place.
fn first_placed(cx: &PositionsCx, node: &Node) -> Result<(ValueId, Place), Reason> {
    let mut placed = node.operands().filter_map(|v| Some((v, (cx.place)(v)?)));
    placed.next().ok_or(MIXED)
}

fn operand(node: &Node, slot: usize) -> Result<ValueId, Reason> {
    node.operand(slot).ok_or("an operand is missing")
}

/// Returns the part of an operand that is broadcast to a result of `rank` axes with these positions.
fn broadcast_part(
    cx: &PositionsCx,
    v: ValueId,
    rank: usize,
    place: &Place,
) -> Result<Part, Reason> {
    let own = dims(cx, v);
    let Some(axis) = (place.axis + own.len()).checked_sub(rank) else {
        return Ok(Part::Whole);
    };
    match &own[axis] {
        dim if is_size(dim, place) => Ok(Part::Chunk(place.at(axis))),
        dim if dim.is_one() => Ok(Part::Whole),
        _ => Err("an operand is broadcast along the positions"),
    }
}

fn broadcast_parts(
    cx: &PositionsCx,
    node: &Node,
    rank: usize,
    place: &Place,
) -> Result<Vec<Part>, Reason> {
    let part = |v: &Option<ValueId>| match v {
        Some(v) => broadcast_part(cx, *v, rank, place),
        None => Ok(Part::Whole),
    };
    node.ins.iter().map(part).collect()
}

/// Returns the place of the positions in a result that operands are broadcast to.
fn broadcast_place(cx: &PositionsCx, node: &Node) -> Result<Place, Reason> {
    let out = dims(cx, node.outs[0]);
    let (v, place) = first_placed(cx, node)?;
    let place = place.at(place.axis + out.len() - cx.graph.ty(v).rank());
    match is_size(&out[place.axis], &place) {
        true => Ok(place),
        false => Err("the positions are broadcast"),
    }
}

fn aligned(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let place = match wanted {
        Some(place) => place.clone(),
        None => broadcast_place(cx, node)?,
    };
    let rank = cx.graph.ty(node.outs[0]).rank();
    Ok(one(node, broadcast_parts(cx, node, rank, &place)?, place))
}

fn expanded(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let place = match wanted {
        Some(place) => place.clone(),
        None => broadcast_place(cx, node)?,
    };
    let rank = cx.graph.ty(node.outs[0]).rank();
    let data = broadcast_part(cx, operand(node, 0)?, rank, &place)?;
    Ok(one(node, vec![data, Part::Sizes], place))
}

/// Elements keep their order, so the products of the sizes before and behind the positions stay.
fn regrouped(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let (x, y) = (operand(node, 0)?, node.outs[0]);
    let moved = |from: ValueId, place: &Place, to: ValueId| {
        let (from, to) = (dims(cx, from), dims(cx, to));
        let before = Dim::product(&from[..place.axis]).mul(&place.outer);
        let behind = Dim::product(&from[place.axis + 1..]).mul(&place.inner);
        (0..to.len()).find_map(|axis| {
            let outer = before.exact_div(&Dim::product(&to[..axis]))?;
            let inner = behind.exact_div(&Dim::product(&to[axis + 1..]))?;
            let place = Place {
                axis,
                outer,
                len: place.len.clone(),
                inner,
            };
            is_size(&to[axis], &place).then_some(place)
        })
    };
    const SPLIT_UP: Reason = "it takes positions apart";
    let (from, to) = match wanted {
        Some(place) => (moved(y, place, x).ok_or(SPLIT_UP)?, place.clone()),
        None => {
            let place = (cx.place)(x).ok_or(MIXED)?;
            let to = moved(x, &place, y).ok_or(SPLIT_UP)?;
            (place, to)
        }
    };
    let mut ins = of_first(node, &from);
    // Only a new shape names the number of positions; other layout ops name axes.
    if node.op == &super::super::shape::RESHAPE {
        ins[1] = Part::Sizes;
    }
    Ok(one(node, ins, to))
}

fn permuted(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let x = operand(node, 0)?;
    let perm = permutation(&node.attrs, cx.graph.ty(x).rank());
    let (from, to) = match wanted {
        Some(place) => (place.at(perm[place.axis]), place.clone()),
        None => {
            let place = (cx.place)(x).ok_or(MIXED)?;
            let axis = perm.iter().position(|p| *p == place.axis).ok_or(MIXED)?;
            (place.clone(), place.at(axis))
        }
    };
    Ok(one(node, vec![Part::Chunk(from)], to))
}

fn product(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    const SUMMED: Reason = "a product sums over positions";
    let (a, b) = (operand(node, 0)?, operand(node, 1)?);
    let rank_of = |v: ValueId| cx.graph.ty(v).rank();
    let rank = rank_of(node.outs[0]);
    if rank_of(b) == 1 && rank_of(a) > 1 {
        let place = wanted_or_of(cx, wanted, a)?;
        return match place.axis + 1 < rank_of(a) {
            true => Ok(one(node, of_first(node, &place), place)),
            false => Err(SUMMED),
        };
    }
    if rank_of(a) < 2 {
        return Err("there is no rule for products of vectors");
    }
    // Axes counted from the end: 1 and 2 are those of matrices.
    let place = match (wanted, (cx.place)(a), (cx.place)(b)) {
        (Some(place), ..) => place.clone(),
        (None, Some(place), _) if place.axis + 1 == rank_of(a) => return Err(SUMMED),
        (None, Some(place), _) => place.at(place.axis + rank - rank_of(a)),
        (None, None, Some(place)) if place.axis + 2 == rank_of(b) => return Err(SUMMED),
        (None, None, Some(place)) => place.at(place.axis + rank - rank_of(b)),
        _ => return Err(MIXED),
    };
    let part = |v: ValueId| broadcast_part(cx, v, rank, &place);
    let ins = match rank - place.axis {
        1 => vec![Part::Whole, part(b)?],
        2 => vec![part(a)?, Part::Whole],
        _ => vec![part(a)?, part(b)?],
    };
    Ok(one(node, ins, place))
}

fn biased_product(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let axis_of_a = usize::from(node.attrs.int("transA") != 0);
    let place = match wanted {
        Some(place) => place.clone(),
        None => {
            let place = (cx.place)(operand(node, 0)?).ok_or("a product sums over positions")?;
            match place.axis == axis_of_a {
                true => place.at(0),
                false => return Err("a product sums over positions"),
            }
        }
    };
    if place.axis != 0 {
        return Err("its columns are positions");
    }
    let mut ins = vec![Part::Chunk(place.at(axis_of_a)), Part::Whole];
    if node.ins.len() > 2 {
        ins.push(match node.operand(2) {
            Some(c) => broadcast_part(cx, c, 2, &place)?,
            None => Part::Whole,
        });
    }
    Ok(one(node, ins, place))
}

fn reduced(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let x = operand(node, 0)?;
    let rank = cx.graph.ty(x).rank();
    let axes = reduced_axes(node, rank, cx.contents);
    let axes = axes.ok_or("the axes that it reduces are not constants")?;
    let keeps = cx.graph.ty(node.outs[0]).rank() == rank;
    let before = |axis: usize| axes.iter().filter(|a| **a < axis).count();
    let mut ins = vec![Part::Whole; node.ins.len()];
    if let Some(place) = wanted {
        let stays = (0..rank).filter(|a| keeps || !axes.contains(a));
        let from = stays.collect::<Vec<usize>>()[place.axis];
        if axes.contains(&from) {
            return Err(MIXED);
        }
        ins[0] = Part::Chunk(place.at(from));
        return Ok(one(node, ins, place.clone()));
    }
    let place = (cx.place)(x).ok_or(MIXED)?;
    ins[0] = Part::Chunk(place.clone());
    if axes.contains(&place.axis) {
        return match node.op == &REDUCE_SUM || node.op == &REDUCE_MEAN {
            true => Ok(Positions {
                ins,
                outs: vec![None],
            }),
            false => Err("it reduces positions to something else than a sum"),
        };
    }
    let axis = place.axis - if keeps { 0 } else { before(place.axis) };
    Ok(one(node, ins, place.at(axis)))
}

fn sliced(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let (x, y) = (operand(node, 0)?, node.outs[0]);
    let rank = cx.graph.ty(x).rank();
    let axes = match node.operand(3) {
        Some(_) => sliced_axes(node, rank, cx.contents),
        None => {
            let starts = operand(node, 1)?;
            let count = cx.graph.ty(starts).dims.first().and_then(Dim::as_const);
            count.map(|n| (0..n as usize).collect())
        }
    };
    let axes = axes.ok_or("the sliced axes are not constants")?;
    let place = wanted_or_of(cx, wanted, x)?;
    let ins = of_first(node, &place);
    let Some(at) = axes.iter().position(|a| *a == place.axis) else {
        return Ok(one(node, ins, place));
    };
    let number = |slot: usize| {
        let ints = node.operand(slot).and_then(|v| cx.contents.get(v));
        ints.and_then(|ints| ints.get(at)?.as_const())
    };
    let steps = node.operand(STEPS).map_or(Some(1), |_| number(STEPS));
    if wanted.is_some() || number(1) != Some(0) || steps != Some(1) || !place.is_own_axis() {
        return Err("it moves positions");
    }
    // The first positions: only the last chunk is shorter.
    let len = cx.graph.ty(y).dims[place.axis].clone();
    Ok(one(node, ins, Place { len, ..place }))
}

/// The op works along an axis that is not that of the positions. Operands of other ranks are no tensors.
fn along(cx: &PositionsCx, node: &Node, wanted: Option<&Place>, axis: i64) -> Fitted {
    let rank = cx.graph.ty(operand(node, 0)?).rank();
    let axis = from_start(axis, rank);
    let gone = |v: ValueId| rank.saturating_sub(cx.graph.ty(v).rank());
    let shift = |v: ValueId, at: usize| at - if axis < at { gone(v) } else { 0 };
    let place = match wanted {
        Some(place) if gone(node.outs[0]) == 0 => place.clone(),
        Some(_) => return Err(MIXED),
        None => {
            let tensors = node.operands().filter(|v| cx.graph.ty(*v).rank() == rank);
            let mut placed = tensors.filter_map(cx.place);
            placed.next().ok_or(MIXED)?
        }
    };
    if place.axis == axis {
        return Err("it works along the positions");
    }
    let part = |v: &Option<ValueId>| match v {
        Some(v) if cx.graph.ty(*v).rank() == rank => match &cx.graph.ty(*v).dims[place.axis] {
            dim if is_size(dim, &place) => Ok(Part::Chunk(place.clone())),
            _ => Err("an operand has other positions"),
        },
        _ => Ok(Part::Whole),
    };
    let ins = node.ins.iter().map(part).collect::<Result<_, _>>()?;
    let outs = node.outs.iter();
    let outs = outs
        .map(|v| Some(place.at(shift(*v, place.axis))))
        .collect();
    Ok(Positions { ins, outs })
}

fn normalised(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let x = operand(node, 0)?;
    let rank = cx.graph.ty(x).rank();
    let place = wanted_or_of(cx, wanted, x)?;
    if place.axis >= axis_of(node, rank) {
        return Err("it normalises over positions");
    }
    let mut ins = of_first(node, &place);
    for slot in 1..node.ins.len() {
        if let Some(v) = node.operand(slot) {
            ins[slot] = broadcast_part(cx, v, rank, &place)?;
        }
    }
    Ok(one(node, ins, place))
}

fn attention(cx: &PositionsCx, id: NodeId) -> Fitted {
    let node = cx.graph.node(id);
    let (q, k, v) = (operand(node, 0)?, operand(node, 1)?, operand(node, 2)?);
    let rank = cx.graph.ty(q).rank();
    let place = (cx.place)(q).ok_or("its queries are the same for all positions")?;
    if place.axis + 2 < rank {
        // Along sequences of a batch, or heads, which segments do not have.
        let part = |(slot, v): (usize, &Option<ValueId>)| match v {
            Some(v) if slot != SEGMENTS => broadcast_part(cx, *v, rank, &place),
            Some(v) if place.axis + 3 < rank => broadcast_part(cx, *v, rank - 2, &place),
            _ => Ok(Part::Whole),
        };
        let ins = node.ins.iter().enumerate().map(part);
        return Ok(one(node, ins.collect::<Result<_, _>>()?, place));
    }
    if place.axis + 2 != rank || !place.is_own_axis() {
        return Err("its queries do not lie along the positions");
    }
    let of = |name: &str| node.attrs.int(name);
    let is_causal = of("causal") != 0 || of("window_right") == 0 || (cx.has_causal_bias)(id);
    let reads_all = of("causal") == 0 && of("window_left") < 0 && of("window_right") < 0;
    let window = Some(of("window_left")).filter(|n| *n >= 0);
    let bias = node.operand(3);
    let sizes = bias.map(|b| dims(cx, b)).unwrap_or_default();
    let row = match sizes.len().checked_sub(2) {
        Some(axis) if is_size(&sizes[axis], &place) => Some(place.at(axis)),
        Some(axis) if !sizes[axis].is_one() => return Err("its bias has other queries"),
        _ => None,
    };
    let (keys, mask) = match ((cx.place)(k), (cx.place)(v)) {
        (None, None) if reads_all => (Part::Whole, None),
        (Some(of_k), Some(of_v)) if of_k == place && of_v == place => {
            if !is_causal {
                return Err("it is not known to be causal");
            }
            let column = match sizes.len().checked_sub(1) {
                Some(axis) if is_size(&sizes[axis], &place) => Some((place.at(axis), window)),
                Some(axis) if !sizes[axis].is_one() => return Err("its bias has other keys"),
                _ => None,
            };
            (Part::Prefix(place.clone(), window), column)
        }
        _ => return Err("its keys do not lie along the positions of its queries"),
    };
    let mut ins = vec![Part::Chunk(place.clone()), keys.clone(), keys.clone()];
    if node.ins.len() > 3 {
        ins.push(match (row, mask) {
            (None, None) => Part::Whole,
            (rows, columns) => Part::Mask { rows, columns },
        });
    }
    if let Some(segments) = node.operand(SEGMENTS) {
        let Part::Prefix(_, window) = keys else {
            return Err("its segments are those of other positions");
        };
        let axis = cx.graph.ty(segments).rank() - 1;
        ins.push(Part::Prefix(place.at(axis), window));
    }
    Ok(one(node, ins, place))
}

/// Losses of rows of classes. A mean divides by what all positions have; who emits the node takes care of that.
fn class_loss(cx: &PositionsCx, node: &Node) -> Fitted {
    let scores = operand(node, 0)?;
    let place = (cx.place)(scores).ok_or(MIXED)?;
    if place.axis != 0 {
        return Err("its rows do not lie along the first axis");
    }
    let of_rows = |slot| match is_class_weight(node.op, slot) {
        true => Part::Whole,
        false => Part::Chunk(place.clone()),
    };
    let ins = (0..node.ins.len()).map(of_rows).collect();
    let each = node.op.axes == BatchAxes::EachClassLoss || node.attrs.str("reduction") == "none";
    let outs = node.outs.iter().enumerate();
    let outs = outs.map(|(i, _)| (each || i > 0).then(|| place.clone()));
    Ok(Positions {
        ins,
        outs: outs.collect(),
    })
}

fn one_hot(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let x = operand(node, 0)?;
    let axis = node.attrs.int("axis");
    if axis != -1 && axis != cx.graph.ty(x).rank() as i64 {
        return Err("its classes lie before the last axis");
    }
    let place = wanted_or_of(cx, wanted, x)?;
    Ok(one(node, of_first(node, &place), place))
}

fn gathered(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let (data, indices) = (operand(node, 0)?, operand(node, 1)?);
    let axis = axis_of(node, cx.graph.ty(data).rank());
    let chosen = cx.graph.ty(indices).rank();
    // Of the result: the axes before `axis` are those of the data, then come those of the indices.
    let is_index = |at: usize| (axis..axis + chosen).contains(&at);
    let place = match (wanted, (cx.place)(data), (cx.place)(indices)) {
        (Some(place), ..) => place.clone(),
        (None, None, Some(place)) => place.at(axis + place.axis),
        (None, Some(place), None) if place.axis < axis => place,
        (None, Some(place), None) if place.axis > axis => place.at(place.axis + chosen - 1),
        (None, Some(_), None) => return Err("it picks positions"),
        _ => return Err(MIXED),
    };
    let ins = match is_index(place.axis) {
        true => vec![Part::Whole, Part::Chunk(place.at(place.axis - axis))],
        false if place.axis < axis => vec![Part::Chunk(place.clone()), Part::Whole],
        false => vec![Part::Chunk(place.at(place.axis + 1 - chosen)), Part::Whole],
    };
    Ok(one(node, ins, place))
}

/// Each index tuple picks a slice of the data. Tuples lie along the last axis of the indices, positions along an axis before it.
fn picked(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let (data, tuples) = (operand(node, 0)?, operand(node, 1)?);
    let place = wanted.cloned().or_else(|| (cx.place)(tuples));
    let place = place.ok_or("it picks positions")?;
    let is_listed = place.axis + 1 < cx.graph.ty(tuples).rank();
    let is_batch = (place.axis as i64) < node.attrs.int("batch_dims");
    let of_data = match (is_listed, is_batch, (cx.place)(data)) {
        (true, true, _) => Part::Chunk(place.clone()),
        (true, false, None) => Part::Whole,
        _ => return Err("it picks positions"),
    };
    Ok(one(node, vec![of_data, Part::Chunk(place.clone())], place))
}

/// Rows are replaced by place; positions lie along an axis that places do not name.
fn scattered(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let (data, places, updates) = (operand(node, 0)?, operand(node, 1)?, operand(node, 2)?);
    let tuples = &cx.graph.ty(places).dims;
    let named = tuples.last().and_then(Dim::as_const);
    let named = named.ok_or("the number of axes that it names is not known")? as usize;
    // Of the updates: the axes of the list come in place of those that are named.
    let listed = tuples.len() - 1;
    let place = match (wanted, (cx.place)(data), (cx.place)(updates)) {
        (Some(place), ..) if place.axis >= named => place.clone(),
        (None, Some(place), _) if place.axis >= named => place,
        (None, None, Some(place)) if place.axis >= listed => place.at(place.axis - listed + named),
        _ => return Err("it replaces positions"),
    };
    let of_updates = place.at(place.axis - named + listed);
    let ins = vec![
        Part::Chunk(place.clone()),
        Part::Whole,
        Part::Chunk(of_updates),
    ];
    Ok(one(node, ins, place))
}

/// Padding and repetition along other axes.
fn padded(cx: &PositionsCx, node: &Node, wanted: Option<&Place>) -> Fitted {
    let x = operand(node, 0)?;
    let place = wanted_or_of(cx, wanted, x)?;
    let is_same = |v: ValueId| is_size(&cx.graph.ty(v).dims[place.axis], &place);
    let before = node.operand(1).and_then(|v| cx.contents.get(v));
    let before = before.and_then(|ints| ints.get(place.axis)?.as_const());
    let moves = node.op == &PAD && (node.operand(3).is_some() || before != Some(0));
    if moves || !is_same(x) || !is_same(node.outs[0]) {
        return Err("it adds or moves positions");
    }
    Ok(one(node, of_first(node, &place), place))
}
