//! Rewrites older forms of standard ops into the form of the op table (opset 23).
//!
//! Most changes between opsets turned an attribute into an operand. A table lists these. A form that neither the table nor a
//! rule below covers is refused.

use crate::onnx::proto::AttributeProto;
use crate::onnx::versions::{self, GREATEST_OPSET};
use ckpt_passes::ir::op::Domain;
use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{DType, Graph, OpDef, Tensor, ValueId};
use ckpt_passes::ops::cast::SATURATE;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Attributes that became operand 1: the ops, the attribute, and the first opset in which it is an operand.
const MOVED: &[(&str, &str, i64)] = &[
    ("Squeeze Unsqueeze ReduceSum", "axes", 13),
    ("Split", "split", 13),
    (
        "ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2",
        "axes",
        18,
    ),
    ("ReduceLogSum ReduceLogSumExp ReduceSumSquare", "axes", 18),
];

/// Returns true if an op is in a list of names with spaces between.
fn is_listed(op: &str, names: &str) -> bool {
    names.split(' ').any(|name| name == op)
}

/// Returns the error for a form of an op that is not supported.
fn unsupported(what: String, expected: String, help: &str) -> Box<Error> {
    Error::model("opset", what).expected(expected).help(help)
}

const CONVERT: &str = "convert it with onnx.version_converter, or export again";

/// Rewrites the attributes and operands of a node in a file of opset `opset`.
///
/// # Errors
/// A form that has no equivalent in the opset of the op table.
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
    let to = attributes
        .get("to")
        .and_then(|to| i32::try_from(to.i()).ok());
    let is_float8 = to
        .and_then(DType::from_onnx_code)
        .is_some_and(DType::is_float8);
    attributes.retain(|name, value| match TYPE_ONLY.contains(&(op.name, name)) {
        // Absent means 1.
        true => is_float8 && *name == SATURATE && value.i() == 0,
        false => true,
    });
    for (ops, name, since) in MOVED {
        if !is_listed(op.name, ops) || opset >= *since {
            continue;
        }
        let Some(attribute) = attributes.remove(name) else {
            continue;
        };
        let tensor = Tensor::ints(&attribute.ints);
        let id = graph.add_init(&format!("{}.{name}", op.name), tensor);
        contents.read_init(graph, id);
        ins.resize(ins.len().max(2), None);
        ins[1] = Some(id);
    }
    if matches!(op.name, "Softmax" | "LogSoftmax") && opset < 13 {
        flattening_softmax(graph, op, attributes, ins)?;
    }
    Ok(())
}

/// Ops whose changes after the opset of the op table do not matter: new element types, or a new attribute with a default,
/// which is refused as unknown if a file gives it (the changelog of onnx 1.23.2).
const SAME_FORM: &str = "Cast CastLike Celu Compress ConstantOfShape DepthToSpace DequantizeLinear Einsum Flatten \
    Identity OneHot Pad QuantizeLinear ReduceLogSum ReduceLogSumExp Reshape Shape Size SpaceToDepth Squeeze TopK Transpose \
    Unsqueeze";

/// Ops that are also read in newer forms than those of the op table, up to that of this opset.
const READ_NEWER: &[(&str, i64)] = &[
    ("Attention", 25),
    ("BitShift", 28),
    ("DequantizeLinear", 25),
    ("Mod", 28),
    ("QuantizeLinear", 25),
    ("Range", 27),
    ("ReverseSequence", 28),
];

/// The first opset in which broadcasting needs no attribute.
const SETTLED_OPSET: i64 = 7;

/// Attributes that matter only to floats of 8 bits, and how to round to a type that is not supported.
const TYPE_ONLY: &[(&str, &str)] = &[("Cast", "round_mode"), ("Cast", SATURATE)];

/// Fails for an op that means something else before [`SETTLED_OPSET`], such as one that broadcasts by an attribute.
pub fn refuse_ancient(op: &str, opset: i64) -> Result<()> {
    let settled = versions::since(op, SETTLED_OPSET);
    if opset >= SETTLED_OPSET || versions::since(op, opset) == settled {
        return Ok(());
    }
    Err(unsupported(
        format!("{op} as it was in opset {opset} is not supported"),
        format!("opset {SETTLED_OPSET} or newer"),
        CONVERT,
    ))
}

/// Fails for an op that means something else after the opset of the op table.
pub fn refuse_newer(op: &str, opset: i64) -> Result<()> {
    let Some(since) = versions::since(op, opset) else {
        return Ok(());
    };
    // `Swish` and the like are new, not changed.
    let is_new = versions::since(op, GREATEST_OPSET).is_none();
    let read = READ_NEWER.iter().any(|(o, to)| *o == op && since <= *to);
    if since <= GREATEST_OPSET || is_new || read || is_listed(op, SAME_FORM) {
        return Ok(());
    }
    Err(unsupported(
        format!("{op} as it is since opset {since} is not supported"),
        format!("opset {GREATEST_OPSET} or older"),
        "export with an older opset",
    ))
}

/// Fails for a form that is older than the row's, unless a rule above covers it.
fn refuse_older(op: &'static OpDef, opset: i64) -> Result<()> {
    let known = MOVED.iter().any(|(ops, ..)| is_listed(op.name, ops))
        || matches!(op.name, "Softmax" | "LogSoftmax");
    match op.domain {
        Domain::Onnx { first, .. } if opset < first && !known => Err(unsupported(
            format!("{} as it was in opset {opset} is not supported", op.name),
            format!("opset {first} or newer"),
            CONVERT,
        )),
        _ => Ok(()),
    }
}

/// Fails unless an older softmax works on the last axis. Before opset 13, softmax flattened the axes from `axis` (default 1)
/// on, which means the same for the last axis only.
fn flattening_softmax(
    graph: &Graph,
    op: &'static OpDef,
    attributes: &BTreeMap<&str, &AttributeProto>,
    ins: &[Option<ValueId>],
) -> Result<()> {
    let axis = attributes.get("axis").map_or(1, |a| a.i());
    let first = ins.first().copied().flatten();
    let ty = first.and_then(|v| graph.value(v).ty.as_ref());
    if axis == -1 || ty.is_some_and(|t| axis == t.rank() as i64 - 1) {
        return Ok(());
    }
    let name = op.name;
    Err(unsupported(
        format!("{name} of opset 12 or older flattens the axes behind {axis}"),
        "the last axis".into(),
        "export with opset 13 or newer",
    ))
}
