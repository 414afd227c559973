//! Older forms of standard ops, rewritten into the rows' form (opset 23).
//!
//! Most changes between opsets moved an attribute into an operand: those are one table. A form that neither the table
//! nor a rule below knows is refused, never guessed.

use crate::onnx::proto::AttributeProto;
use crate::onnx::versions::{self, GREATEST_OPSET};
use ckpt_passes::ir::op::Domain;
use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{Graph, OpDef, Tensor, ValueId};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Up to which opset an op took an operand as an attribute.
struct Moved {
    op: &'static str,
    attribute: &'static str,
    /// First opset in which it is an operand.
    since: i64,
    slot: usize,
}

const fn moved(op: &'static str, attribute: &'static str, since: i64, slot: usize) -> Moved {
    Moved {
        op,
        attribute,
        since,
        slot,
    }
}

const MOVED: &[Moved] = &[
    moved("Squeeze", "axes", 13, 1),
    moved("Unsqueeze", "axes", 13, 1),
    moved("Split", "split", 13, 1),
    moved("ReduceSum", "axes", 13, 1),
    moved("ReduceMean", "axes", 18, 1),
    moved("ReduceMax", "axes", 18, 1),
    moved("ReduceMin", "axes", 18, 1),
    moved("ReduceProd", "axes", 18, 1),
    moved("ReduceL1", "axes", 18, 1),
    moved("ReduceL2", "axes", 18, 1),
    moved("ReduceLogSum", "axes", 18, 1),
    moved("ReduceLogSumExp", "axes", 18, 1),
    moved("ReduceSumSquare", "axes", 18, 1),
];

/// Rewrites attributes and operands of a node that a file of opset `opset` holds.
///
/// # Errors
/// A form that has no equal in the internal opset.
pub fn upgrade(
    graph: &mut Graph,
    contents: &mut Contents,
    op: &'static OpDef,
    opset: i64,
    attributes: &mut BTreeMap<&str, &AttributeProto>,
    ins: &mut Vec<Option<ValueId>>,
) -> Result<()> {
    refuse_older(op, opset)?;
    refuse_newer(op.name, opset)?;
    attributes.retain(|name, _| !(TYPE_ONLY.contains(&(op.name, name))));
    for row in MOVED.iter().filter(|m| m.op == op.name && opset < m.since) {
        let Some(attribute) = attributes.remove(row.attribute) else {
            continue;
        };
        let tensor = Tensor::ints(&attribute.ints);
        let id = graph.add_init(&format!("{}.{}", op.name, row.attribute), tensor);
        contents.read_init(graph, id);
        while ins.len() <= row.slot {
            ins.push(None);
        }
        ins[row.slot] = Some(id);
    }
    if matches!(op.name, "Softmax" | "LogSoftmax") && opset < 13 {
        flattening_softmax(graph, op, attributes, ins)?;
    }
    Ok(())
}

/// Ops that changed after the internal opset in the element types they take, or in an attribute that has a default and
/// that is refused as unknown where it is given (the changelog of onnx 1.23.2, compared form by form).
const SAME_FORM: &[&str] = &[
    "Cast",
    "CastLike",
    "Celu",
    "Compress",
    "ConstantOfShape",
    "DepthToSpace",
    "DequantizeLinear",
    "Einsum",
    "Flatten",
    "Identity",
    "OneHot",
    "Pad",
    "QuantizeLinear",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "Reshape",
    "Shape",
    "Size",
    "SpaceToDepth",
    "Squeeze",
    "TopK",
    "Transpose",
    "Unsqueeze",
];

/// Ops that are read in the forms they have since the internal opset, too, up to that of the number.
const READ_NEWER: &[(&str, i64)] = &[
    ("Attention", 25),
    ("BitShift", 28),
    ("DequantizeLinear", 25),
    ("Mod", 28),
    ("QuantizeLinear", 25),
    ("Range", 27),
    ("ReverseSequence", 28),
];

/// The opset from which on every older form that we read is known.
const SETTLED_OPSET: i64 = 7;

/// Attributes that only say something about element types that we do not have: how to round to 8-bit floats.
const TYPE_ONLY: &[(&str, &str)] = &[("Cast", "round_mode"), ("Cast", "saturate")];

/// Refuses an op that means something else before [`SETTLED_OPSET`]: broadcasting by attribute, and the like.
pub fn refuse_ancient(op: &str, opset: i64) -> Result<()> {
    let settled = versions::since(op, SETTLED_OPSET);
    if opset >= SETTLED_OPSET || versions::since(op, opset) == settled {
        return Ok(());
    }
    Err(Error::model(
        "opset",
        format!("{op} as it was in opset {opset} is not supported"),
    )
    .expected(format!("opset {SETTLED_OPSET} or newer"))
    .help("convert it with onnx.version_converter, or export again"))
}

/// Refuses an op that means something else after the internal opset.
pub fn refuse_newer(op: &str, opset: i64) -> Result<()> {
    let Some(since) = versions::since(op, opset) else {
        return Ok(());
    };
    // `Swish` and the like are new, not changed.
    let is_new = versions::since(op, GREATEST_OPSET).is_none();
    let read = READ_NEWER.iter().any(|(o, to)| *o == op && since <= *to);
    if since <= GREATEST_OPSET || is_new || read || SAME_FORM.contains(&op) {
        return Ok(());
    }
    Err(Error::model(
        "opset",
        format!("{op} as it is since opset {since} is not supported"),
    )
    .expected(format!("opset {GREATEST_OPSET} or older"))
    .help("export with an older opset"))
}

/// Refuses a form older than the row's, unless a rule above knows it.
fn refuse_older(op: &'static OpDef, opset: i64) -> Result<()> {
    let first = match op.domain {
        Domain::Onnx { first, .. } => Some(first),
        Domain::Ckpt | Domain::Opaque => None,
    };
    let known =
        MOVED.iter().any(|m| m.op == op.name) || matches!(op.name, "Softmax" | "LogSoftmax");
    match first {
        Some(first) if opset < first && !known => Err(Error::model(
            "opset",
            format!("{} as it was in opset {opset} is not supported", op.name),
        )
        .expected(format!("opset {first} or newer"))
        .help("convert it with onnx.version_converter, or export again")),
        _ => Ok(()),
    }
}

/// Before opset 13 softmax flattened its operand behind `axis` (default 1): the same thing on the last axis only.
fn flattening_softmax(
    graph: &Graph,
    op: &'static OpDef,
    attributes: &BTreeMap<&str, &AttributeProto>,
    ins: &[Option<ValueId>],
) -> Result<()> {
    let axis = attributes.get("axis").map_or(1, |a| a.i());
    let rank = ins
        .first()
        .copied()
        .flatten()
        .and_then(|v| graph.value(v).ty.as_ref())
        .map(|t| t.rank() as i64);
    if axis == -1 || rank.is_some_and(|r| axis == r - 1) {
        return Ok(());
    }
    Err(Error::model(
        "opset",
        format!(
            "{} of opset 12 or older flattens the axes behind {axis}",
            op.name
        ),
    )
    .expected("the last axis")
    .help("export with opset 13 or newer"))
}
