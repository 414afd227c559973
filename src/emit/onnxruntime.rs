//! Collectives as ops of ONNX Runtime's builds with NCCL (`--collectives onnxruntime`).
//!
//! A sum over ranks becomes `NcclAllReduce`, and the tensors of all ranks one after the other `AllGather`, both of the domain
//! com.microsoft. A sum that is begun and waited for is one op there.
//!
//! Ops that give each rank a slice by its number are refused. `NcclReduceScatter` and `NcclAllGather` leave whole tensors on one
//! rank each ("a single rank must be responsible for the entire tensor", orttraining's nccl_kernels.cc), and no op tells a rank
//! its number.

use crate::onnx::messages::attribute;
use crate::onnx::proto::NodeProto;
use ckpt_passes::ir::edit::NewNode;
use ckpt_passes::ir::{Attr, Attrs, DType, Graph, Node, NodeId, OpDef, Tensor, ValueId};
use ckpt_passes::ops::collective::{
    ALL_REDUCE, CONCAT_RANKS, DATA_PARALLEL, GROUP, OWN_PART, RANKS, ROWS, SHARED,
    START_ALL_REDUCE, WAIT, groups, is_of_ranks,
};
use ckpt_passes::ops::opaque::OPAQUE;
use ckpt_passes::ops::shape::IDENTITY;
use ckpt_passes::{Error, Result};
use prost::Message;
use std::collections::BTreeSet;

const DOMAIN: &str = "com.microsoft";

/// The number of ONNX Runtime's group of all ranks.
const ALL: i64 = 0;
/// The number of its group of ranks with different examples.
const DATA: i64 = 1;
/// The number of its group of ranks that share layers.
const HORIZONTAL: i64 = 4;

const ROUNDS: &str = "NCCL adds up tensors in an order of its own, so sums over ranks may differ from ours by rounding";

fn refused(graph: &Graph, id: NodeId, why: &str) -> Box<Error> {
    Error::usage(
        "collectives",
        format!("ONNX Runtime has no op for this node: {why}"),
    )
    .at(graph.describe(id))
    .help("leave --collectives out: `ckpt-opt train` and `ckpt-opt run` execute it")
}

/// Replaces the collectives of a graph that is about to be written. Returns what the user should know.
///
/// # Errors
/// A node without an equivalent: what a rank has by its number, other types than floating-point numbers of 16 to 64 bits.
pub fn use_onnxruntime(graph: &mut Graph) -> Result<Vec<String>> {
    let is_mesh = groups(graph).len() > 1;
    let old = graph.order().to_vec();
    let mut gone = BTreeSet::new();
    let mut parts = Vec::new();
    let mut order = Vec::with_capacity(old.len());
    for id in &old {
        let node = graph.node(*id).clone();
        let first = graph.order().len();
        match replaced(graph, *id, &node, is_mesh)? {
            None => order.push(*id),
            Some(new) => {
                order.extend(&graph.order()[first..]);
                if node.op == &OWN_PART {
                    parts.push(graph.value(new).name.clone());
                }
                replace(graph, node.outs[0], new, graph.order().len() > first);
                gone.insert(*id);
            }
        }
    }
    graph.remove_nodes(&|id| gone.contains(&id));
    graph.set_order(order);
    let mut warnings = Vec::new();
    if !gone.is_empty() {
        warnings.push(ROUNDS.into());
    }
    if !parts.is_empty() {
        warnings.push(format!(
            "give each rank its own part of {}",
            parts.join(", ")
        ));
    }
    Ok(warnings)
}

/// Emits what stands for a node. Returns its result; nothing for a node that stays.
fn replaced(graph: &mut Graph, id: NodeId, node: &Node, is_mesh: bool) -> Result<Option<ValueId>> {
    let (op, ranks) = (node.op, node.attrs.opt_int(RANKS).unwrap_or(1));
    let Some(x) = node.operand(0) else {
        return Ok(None);
    };
    let (op_type, attrs) = if op == &OWN_PART || op == &SHARED {
        return Ok(Some(x));
    } else if op == &WAIT {
        return Ok(Some(stand_in(graph, node, (&IDENTITY, Attrs::new()), x)));
    } else if op == &ALL_REDUCE || op == &START_ALL_REDUCE {
        let group = match node.attrs.str(GROUP) {
            _ if !is_mesh => ALL,
            DATA_PARALLEL => DATA,
            _ => HORIZONTAL,
        };
        ("NcclAllReduce", vec![("group_type", group)])
    } else if op == &CONCAT_RANKS && !is_mesh {
        ("AllGather", vec![("axis", 0), ("group_size", ranks)])
    } else if op == &CONCAT_RANKS {
        return Err(refused(
            graph,
            id,
            "`AllGather` is over all ranks, and these are some of them",
        ));
    } else if ROWS.contains(&op) || is_of_ranks(node) {
        return Err(refused(graph, id, "it depends on the number of the rank"));
    } else {
        return Ok(None);
    };
    let dtype = graph.ty(x).dtype;
    if !matches!(dtype, DType::F16 | DType::F32 | DType::F64) {
        return Err(refused(graph, id, "it exchanges other types")
            .expected("float16, float32 or float64")
            .found(dtype.to_string()));
    }
    let attrs = foreign(op_type, &attrs)?;
    Ok(Some(stand_in(graph, node, (&OPAQUE, attrs), x)))
}

/// Returns the attributes of a node of ONNX Runtime's domain.
fn foreign(op_type: &str, attrs: &[(&str, i64)]) -> Result<Attrs> {
    let attribute = |(name, n): &(&str, i64)| attribute(name, &Attr::Int(*n));
    let message = NodeProto {
        op_type: Some(op_type.into()),
        domain: Some(DOMAIN.into()),
        attribute: attrs.iter().map(attribute).collect::<Result<_>>()?,
        ..NodeProto::default()
    };
    let raw = message.encode_to_vec();
    let raw = Tensor::new(DType::U8, [raw.len() as u64], raw);
    Ok(Attrs::new()
        .with("domain", DOMAIN)
        .with("op_type", op_type)
        .with("version", 1)
        .with("node", Attr::Tensor(raw)))
}

/// Adds a node that makes what another one makes.
fn stand_in(
    graph: &mut Graph,
    node: &Node,
    (op, attrs): (&'static OpDef, Attrs),
    x: ValueId,
) -> ValueId {
    let out = graph.value(node.outs[0]);
    let outs = vec![(out.name.clone(), out.ty.clone())];
    let new = graph.add_node(NewNode {
        op,
        name: &node.name,
        attrs,
        ins: vec![Some(x)],
        outs,
        loc: node.loc.clone(),
        role: node.role,
    });
    graph.node(new).outs[0]
}

/// Gives the readers of a value to another one, and its name if that `is_made` for it.
fn replace(graph: &mut Graph, old: ValueId, new: ValueId, is_made: bool) {
    graph.replace_uses(old, new);
    let name = graph.value(old).name.clone();
    if is_made {
        graph.rename_value(old, &format!("{name}/replaced"));
        graph.rename_value(new, &name);
    }
}
