//! How a node computes a rank's part of its results from parts of its operands, so that ranks share a layer.
//!
//! A rule states which operands are needed in parts and which whole, for a part of a result. The node is then run on these
//! alone, with smaller sizes where an operand lists them. Only a product that sums over the parts ([`summed`]) has a result that
//! ranks must add up. An op without a rule stays whole on every rank.

use super::super::attention::ATTENTION;
use super::super::collective::Part;
use super::super::concat::{CONCAT, SPLIT};
use super::super::index::GATHER;
use super::super::norm::{LAYER_NORM, RMS_NORM};
use super::super::rotary::ROTARY;
use super::super::slice::STEPS;
use super::{RESHAPE, Reason, axis_of, permutation, reduced_axes, sliced_axes};
use crate::matmul::{GEMM, MATMUL};
use ckpt_ir::op::{BatchAxes, Effect, OpClass};
use ckpt_ir::typing::Contents;
use ckpt_ir::{Dim, Graph, Node, NodeId, Same, ValueId};

/// What the rules look at.
pub struct PartCx<'a> {
    /// The graph of the node.
    pub graph: &'a Graph,
    /// Known contents of small integer values.
    pub contents: &'a Contents,
}

/// What a node needs for parts of its results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parted {
    /// The part of each operand; `None` where the whole is read.
    pub ins: Vec<Option<Part>>,
    /// The part of each result.
    pub outs: Vec<Part>,
    /// The operand that lists sizes of a result, and the places in its list that are those of the part.
    pub sizes: Option<(usize, Vec<usize>)>,
}

/// A product that sums over the parts of its operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summed {
    /// The part of the first operand.
    pub left: Part,
    /// The part of the second, a matrix.
    pub right: Part,
}

const MIXED: Reason = "it reads all of the axis for each element";
const NO_RULE: Reason = "there is no rule for a part of its result";
const UNKNOWN: Reason = "a size is not a constant";

/// Returns what a node needs for a part of its result `slot`.
///
/// # Errors
/// Why the node cannot compute a part by itself.
pub fn parted(cx: &PartCx, id: NodeId, slot: usize, part: &Part) -> Result<Parted, Reason> {
    let node = cx.graph.node(id);
    match node.op.effect {
        Effect::Seeded => return Err("it draws random numbers, by the number of the element"),
        Effect::Pure => {}
        _ => return Err(NO_RULE),
    }
    if node.op == &SPLIT {
        return pieces(cx, node, part);
    }
    let rank = |v: ValueId| cx.graph.ty(v).rank();
    let out_rank = rank(node.outs[slot]);
    let mut done = Parted {
        ins: vec![None; node.ins.len()],
        outs: vec![part.clone(); node.outs.len()],
        sizes: None,
    };
    // The heads have the same place in the result of an attention and in its log-sum-exp.
    let is_alike = |v: ValueId| rank(v) == out_rank || node.op == &ATTENTION;
    if !node.outs.iter().all(|v| is_alike(*v)) {
        return Err(NO_RULE);
    }
    let first = node.operand(0).ok_or(NO_RULE)?;
    let same = |axis: usize| Part {
        axis,
        pieces: part.pieces.clone(),
    };
    match node.op.axes {
        BatchAxes::Pointwise => broadcast(cx, node, part, &mut done)?,
        BatchAxes::Regrouped => {
            done.ins[0] = Some(regrouped(cx, node, part)?);
            if node.op == &RESHAPE {
                done.sizes = Some((1, vec![part.axis]));
            }
        }
        BatchAxes::Permuted => {
            let perm = permutation(&node.attrs, out_rank);
            done.ins[0] = Some(same(*perm.get(part.axis).ok_or(NO_RULE)?));
        }
        BatchAxes::Broadcast => {
            done.ins[0] = aligned(cx, node, first, part)?;
            let shape = node.operand(1).and_then(|v| cx.contents.get(v));
            let listed = shape.ok_or(UNKNOWN)?.len();
            let at = (part.axis + listed).checked_sub(out_rank);
            done.sizes = at.map(|at| (1, vec![at]));
        }
        BatchAxes::Product => {
            let second = node.operand(1).ok_or(NO_RULE)?;
            if rank(first) < 2 || rank(second) < 2 {
                return Err(MIXED);
            }
            match out_rank - part.axis {
                1 => done.ins[1] = Some(same(rank(second) - 1)),
                2 => done.ins[0] = Some(same(rank(first) - 2)),
                _ => {
                    done.ins[0] = aligned(cx, node, first, part)?;
                    done.ins[1] = aligned(cx, node, second, part)?;
                }
            }
        }
        BatchAxes::BiasedProduct => {
            let turned = |name: &str| usize::from(node.attrs.int(name) != 0);
            match part.axis {
                0 => done.ins[0] = Some(same(turned("transA"))),
                _ => done.ins[1] = Some(same(1 - turned("transB"))),
            }
            if let Some(c) = node.operand(2) {
                done.ins[2] = aligned(cx, node, c, part)?;
            }
        }
        BatchAxes::Reduced => {
            let axes = reduced_axes(node, rank(first), cx.contents).ok_or(UNKNOWN)?;
            let keeps = node.attrs.int("keepdims") != 0;
            let mut stay = (0..rank(first)).filter(|axis| keeps || !axes.contains(axis));
            let axis = stay.nth(part.axis).ok_or(NO_RULE)?;
            if axes.contains(&axis) {
                return Err(MIXED);
            }
            done.ins[0] = Some(same(axis));
        }
        BatchAxes::Sliced => {
            let axes = sliced_axes(node, out_rank, cx.contents).ok_or(UNKNOWN)?;
            done.ins[0] = match axes.iter().position(|axis| *axis == part.axis) {
                Some(at) => Some(every_nth(cx, node, part, at)?),
                None => Some(part.clone()),
            };
        }
        BatchAxes::AlongAxis if node.op.class == OpClass::Softmax => {
            if axis_of(node, out_rank) == part.axis {
                return Err(MIXED);
            }
            done.ins[0] = Some(part.clone());
        }
        _ => mixed(cx, node, part, &mut done)?,
    }
    Ok(done)
}

/// Ops whose field `axes` gives no rule.
fn mixed(cx: &PartCx, node: &Node, part: &Part, done: &mut Parted) -> Result<(), Reason> {
    let rank = |v: ValueId| cx.graph.ty(v).rank();
    let out_rank = rank(node.outs[0]);
    let back = out_rank - part.axis;
    if (node.op == &ROTARY && back == 1) || (node.op == &ATTENTION && back != 3) {
        return Err(MIXED);
    }
    let is_norm = node.op == &LAYER_NORM || node.op == &RMS_NORM;
    if is_norm && part.axis >= axis_of(node, out_rank) {
        return Err("it norms along the axis");
    }
    if is_norm || node.op == &ROTARY || node.op == &ATTENTION {
        return broadcast(cx, node, part, done);
    }
    if node.op == &CONCAT {
        if axis_of(node, out_rank) == part.axis {
            return Err("it joins tensors along the axis");
        }
        done.ins = vec![Some(part.clone()); node.ins.len()];
        return Ok(());
    }
    if node.op == &GATHER {
        let (data, places) = (node.operand(0), node.operand(1));
        let (data, places) = data.zip(places).ok_or(NO_RULE)?;
        let (axis, chosen) = (axis_of(node, rank(data)), rank(places));
        let from = match part.axis {
            at if at < axis => at,
            at if at >= axis + chosen => at + 1 - chosen,
            _ => return Err("it takes some indices of the axis"),
        };
        done.ins[0] = Some(Part {
            axis: from,
            pieces: part.pieces.clone(),
        });
        return Ok(());
    }
    Err(NO_RULE)
}

/// The part of an operand that broadcasts to the result; `None` if all of it is read for every index.
fn aligned(cx: &PartCx, node: &Node, v: ValueId, part: &Part) -> Result<Option<Part>, Reason> {
    let dims = &cx.graph.ty(v).dims;
    let back = cx.graph.ty(node.outs[0]).rank() - part.axis;
    let Some(axis) = dims.len().checked_sub(back) else {
        return Ok(None);
    };
    match dims[axis].as_const() {
        Some(1) => Ok(None),
        Some(n) if n == part.size() => Ok(Some(Part {
            axis,
            pieces: part.pieces.clone(),
        })),
        // Heads of keys that several heads of queries read.
        Some(n) if node.op == &ATTENTION && part.pieces.len() == 1 => Ok(Some(Part::of(axis, n))),
        _ => Err(UNKNOWN),
    }
}

fn broadcast(cx: &PartCx, node: &Node, part: &Part, done: &mut Parted) -> Result<(), Reason> {
    for (slot, v) in node.ins.iter().enumerate() {
        if let Some(v) = v {
            done.ins[slot] = aligned(cx, node, *v, part)?;
        }
    }
    Ok(())
}

/// Elements keep their order, so the part is the same share of the axis that begins after as many elements.
fn regrouped(cx: &PartCx, node: &Node, part: &Part) -> Result<Part, Reason> {
    let (x, y) = (node.operand(0).ok_or(NO_RULE)?, node.outs[0]);
    let (x, y) = (&cx.graph.ty(x).dims, &cx.graph.ty(y).dims);
    let before = |dims: &[Dim], axis: usize| Dim::product(&dims[..axis]);
    let wanted = before(y, part.axis);
    // Each axis with as many elements before it, of which the last is no axis of size 1.
    let begins = |times: i64| {
        let times = Dim::from(times);
        let mut axes = (0..x.len()).rev();
        axes.find(|i| !x[*i].is_one() && before(x, *i).mul(&times).same(&wanted) == Same::Yes)
    };
    let size = |axis: usize| x[axis].as_const().ok_or(UNKNOWN);
    if let Some(axis) = begins(1) {
        let n = size(axis)?;
        return match part.pieces.len() {
            1 => Ok(Part::of(axis, n)),
            _ if n == part.size() => Ok(Part {
                axis,
                pieces: part.pieces.clone(),
            }),
            _ => Err("it divides an axis of several pieces"),
        };
    }
    // An axis that is taken apart into pieces, of each of which this is a share.
    let Some(count) = part.axis.checked_sub(1).and_then(|at| y[at].as_const()) else {
        return Err(MIXED);
    };
    match begins(count.max(1)).map(|axis| (axis, size(axis))) {
        Some((axis, Ok(n))) if part.pieces.len() == 1 && n % count == 0 => Ok(Part {
            axis,
            pieces: vec![n / count; count as usize],
        }),
        _ => Err(MIXED),
    }
}

/// Every n-th index of an axis that is n times as long as the result, as where gates and values take turns: a share of the
/// indices is that of a share of the axis. `at` is the place of the axis in the lists of the slice.
fn every_nth(cx: &PartCx, node: &Node, part: &Part, at: usize) -> Result<Part, Reason> {
    let number = |slot: usize| cx.contents.get(node.operand(slot)?)?.get(at)?.as_const();
    let whole = cx.graph.ty(node.ins[0].ok_or(NO_RULE)?).dims[part.axis].as_const();
    match (whole, number(1), number(2), number(STEPS)) {
        (Some(n), Some(from), Some(to), Some(step))
            if (0..step).contains(&from)
                && to >= n
                && part.pieces.len() == 1
                && part.size() * step == n =>
        {
            Ok(Part::of(part.axis, n))
        }
        _ => Err("it takes some indices of the axis"),
    }
}

/// Consecutive pieces along an axis.
fn pieces(cx: &PartCx, node: &Node, part: &Part) -> Result<Parted, Reason> {
    let rank = cx.graph.ty(node.outs[0]).rank();
    let mut ins = vec![None; node.ins.len()];
    if axis_of(node, rank) != part.axis {
        ins[0] = Some(part.clone());
        return Ok(Parted {
            ins,
            outs: vec![part.clone(); node.outs.len()],
            sizes: None,
        });
    }
    if part.pieces.len() > 1 {
        return Err("it divides an axis of several pieces");
    }
    let sizes = node
        .outs
        .iter()
        .map(|v| cx.graph.ty(*v).dims[part.axis].as_const());
    let sizes: Vec<i64> = sizes.collect::<Option<_>>().ok_or(UNKNOWN)?;
    ins[0] = Some(Part {
        axis: part.axis,
        pieces: sizes.clone(),
    });
    let listed = node.operand(1).map(|_| (1, (0..sizes.len()).collect()));
    Ok(Parted {
        ins,
        outs: sizes.iter().map(|n| Part::of(part.axis, *n)).collect(),
        sizes: listed,
    })
}

/// Returns the parts over which a product sums, if its second operand is a matrix. A bias is no part: it is added to the sum.
pub fn summed(graph: &Graph, id: NodeId) -> Option<Summed> {
    let node = graph.node(id);
    let (a, b) = (node.operand(0)?, node.operand(1)?);
    let rank = |v: ValueId| graph.ty(v).rank();
    let turned = |name: &str| usize::from(node.attrs.int(name) != 0);
    let (left, right) = if node.op == &MATMUL {
        (rank(a).checked_sub(1)?, 0)
    } else if node.op == &GEMM && node.attrs.float("beta") == 1.0 {
        (1 - turned("transA"), turned("transB"))
    } else {
        return None;
    };
    let size = graph.ty(b).dims.get(right)?.as_const()?;
    (rank(b) == 2 && rank(a) >= 2).then(|| Summed {
        left: Part::of(left, size),
        right: Part::of(right, size),
    })
}
