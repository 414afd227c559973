//! Bodies of our own ops as model-local ONNX functions.
//!
//! A function is a specialisation: one per op, operand types and attributes, so that its body needs no control flow.
//! Equal bodies share one function. The name is `<Op>_<n>`; a reader finds the row by what stands before the last `_`.

use crate::frontend::onnx::proto::{FunctionProto, NodeProto, OperatorSetIdProto};
use ckpt_passes::ir::op::Domain;
use ckpt_passes::ir::{Def, Graph, Node};
use ckpt_passes::{Error, Result, ops};

use super::onnx;

/// The lowest opset of the standard domain that every node of `graph` fits.
pub fn needed_opset(graph: &Graph) -> i64 {
    graph
        .nodes()
        .map(|(id, _)| ops::first_opset(graph, id))
        .max()
        .unwrap_or(0)
}

/// The function of a body (see `ckpt_passes::ir::op::body_of`) for a node of our domain.
///
/// # Errors
/// A body that is not made of standard ops and small constants: our bug.
pub fn function(body: &Graph, name: &str, node: &Node) -> Result<FunctionProto> {
    let mut nodes: Vec<NodeProto> = Vec::new();
    for (id, value) in body.inits() {
        if value.uses().is_empty() && !body.is_output(id) {
            continue;
        }
        if let Def::Init(tensor) = &value.def {
            nodes.push(onnx::constant(&value.name, tensor)?);
        }
    }
    for id in body.order() {
        if !matches!(body.node(*id).op.domain, Domain::Onnx { .. }) {
            return Err(Error::bug(
                "body",
                format!(
                    "the body of {} uses {}",
                    node.op.name,
                    body.node(*id).op.name
                ),
            ));
        }
        nodes.push(onnx::node(body, *id, "", node_op_type(body, *id))?);
    }
    let formal = |i: usize| node.op.ins[i.min(node.op.ins.len() - 1)].name;
    // Operands that are not given still have a place among the formal ones.
    let mut given = body.inputs().iter();
    let input = node
        .ins
        .iter()
        .enumerate()
        .map(|(i, v)| match v {
            Some(_) => given
                .next()
                .map_or(String::new(), |id| body.value(*id).name.clone()),
            None => formal(i).to_string(),
        })
        .collect();
    Ok(FunctionProto {
        name: Some(name.to_string()),
        domain: Some(Domain::CKPT.to_string()),
        input,
        output: body
            .outputs()
            .iter()
            .map(|v| body.value(*v).name.clone())
            .collect(),
        attribute: node
            .attrs
            .iter()
            .map(|(name, _)| name.to_string())
            .collect(),
        node: nodes,
        opset_import: vec![opset_import("", needed_opset(body).max(onnx::LEAST_OPSET))],
        ..FunctionProto::default()
    })
}

fn node_op_type(graph: &Graph, id: ckpt_passes::ir::NodeId) -> &'static str {
    graph.node(id).op.name
}

/// An entry of `opset_import`.
pub fn opset_import(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto {
        domain: Some(domain.to_string()),
        version: Some(version),
    }
}
