//! Nodes, attributes, tensors and functions as ONNX messages.

use super::proto::{
    AttributeProto, FunctionProto, NodeProto, OperatorSetIdProto, TensorProto,
    attribute_proto::AttributeType,
};
use super::versions::LEAST_OPSET;
use bytes::Bytes;
use ckpt_passes::ir::op::Domain;
use ckpt_passes::ir::{Attr, Def, Graph, Node, NodeId, Tensor};
use ckpt_passes::{Error, Result, ops};

/// Writes a node without metadata.
///
/// # Errors
/// See [`attribute`].
pub fn node(graph: &Graph, id: NodeId, domain: &str, op_type: &str) -> Result<NodeProto> {
    let node = graph.node(id);
    Ok(NodeProto {
        name: Some(node.name.clone()),
        op_type: Some(op_type.into()),
        domain: Some(domain.into()),
        input: node
            .ins
            .iter()
            .map(|v| v.map_or(String::new(), |v| graph.value(v).name.clone()))
            .collect(),
        output: node
            .outs
            .iter()
            .map(|v| graph.value(*v).name.clone())
            .collect(),
        attribute: node
            .attrs
            .iter()
            .map(|(n, a)| attribute(n, a))
            .collect::<Result<_>>()?,
        ..NodeProto::default()
    })
}

/// Writes a `Constant` node, for function bodies, which have no initializers.
///
/// # Errors
/// See [`attribute`].
pub fn constant(name: &str, tensor: &Tensor) -> Result<NodeProto> {
    Ok(NodeProto {
        name: Some(name.into()),
        op_type: Some("Constant".into()),
        domain: Some(String::new()),
        output: vec![name.into()],
        attribute: vec![attribute("value", &Attr::Tensor(tensor.clone()))?],
        ..NodeProto::default()
    })
}

/// Writes an attribute.
///
/// # Errors
/// A tensor without content: our bug.
pub fn attribute(name: &str, value: &Attr) -> Result<AttributeProto> {
    let mut message = AttributeProto {
        name: Some(name.into()),
        ..AttributeProto::default()
    };
    message.set_type(match value {
        Attr::Int(_) | Attr::DType(_) => AttributeType::Int,
        Attr::Float(_) => AttributeType::Float,
        Attr::Str(_) => AttributeType::String,
        Attr::Ints(_) => AttributeType::Ints,
        Attr::Floats(_) => AttributeType::Floats,
        Attr::Strs(_) => AttributeType::Strings,
        Attr::Tensor(_) => AttributeType::Tensor,
    });
    match value {
        Attr::Int(v) => message.i = Some(*v),
        Attr::DType(v) => message.i = Some(i64::from(v.onnx_code())),
        Attr::Float(v) => message.f = Some(*v),
        Attr::Str(v) => message.s = Some(v.clone().into_bytes()),
        Attr::Ints(v) => message.ints.clone_from(v),
        Attr::Floats(v) => message.floats.clone_from(v),
        Attr::Strs(v) => message.strings = v.iter().map(|s| s.clone().into_bytes()).collect(),
        Attr::Tensor(v) => {
            let absent = || {
                let what = format!("the content of attribute `{name}` is absent");
                Error::bug("attribute", what)
            };
            message.t = Some(inline("", v, v.bytes().ok_or_else(absent)?.clone()));
        }
    }
    Ok(message)
}

/// Writes a tensor with its content inside the message.
pub fn inline(name: &str, tensor: &Tensor, bytes: Bytes) -> TensorProto {
    TensorProto {
        raw_data: Some(bytes),
        ..header(name, tensor)
    }
}

/// Writes name, sizes and element type of a tensor, without content.
pub fn header(name: &str, tensor: &Tensor) -> TensorProto {
    TensorProto {
        name: (!name.is_empty()).then(|| name.to_string()),
        dims: tensor.dims.iter().map(|d| *d as i64).collect(),
        data_type: Some(tensor.dtype.onnx_code()),
        ..TensorProto::default()
    }
}

/// Returns the lowest opset of the standard domain that every node of `graph` fits.
pub fn needed_opset(graph: &Graph) -> i64 {
    graph
        .nodes()
        .map(|(id, _)| ops::first_opset(graph, id))
        .max()
        .unwrap_or(0)
}

/// Writes the body of a node of our domain (see [`body_of`](ckpt_passes::ops::body_of)) as a model-local function.
///
/// A function is a specialisation, one per op, operand types and attributes, so that its body needs no control flow.
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
            nodes.push(constant(&value.name, tensor)?);
        }
    }
    for id in body.order() {
        if !matches!(body.node(*id).op.domain, Domain::Onnx { .. }) {
            let (name, used) = (node.op.name, body.node(*id).op.name);
            return Err(Error::bug(
                "body",
                format!("the body of {name} uses {used}"),
            ));
        }
        nodes.push(self::node(body, *id, "", body.node(*id).op.name)?);
    }
    let formal = |i: usize| node.op.ins[i.min(node.op.ins.len() - 1)].name;
    // An operand that is not given keeps its place among the formal ones.
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
        opset_import: vec![opset_import("", needed_opset(body).max(LEAST_OPSET))],
        ..FunctionProto::default()
    })
}

/// Builds an entry of `opset_import`.
pub fn opset_import(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto {
        domain: Some(domain.to_string()),
        version: Some(version),
    }
}
