//! [`Graph`] to `ModelProto`: a valid ONNX file, nodes in schedule order.
//!
//! Opset: what the graph needs, at least 18. IR version 10, unless the file that was read had a higher one. Ops of our
//! own become calls of model-local functions (see `function.rs`). Every node says in string metadata what it is
//! (`ckpt.role`, `ckpt.of`, `ckpt.segment`, …), and trained initializers are graph inputs too, so that a caller can
//! override them. Weights are not copied: bytes are shared with the mapped file they came from.

use super::function::{function, needed_opset, opset_import};
use crate::frontend::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_proto::DataLocation,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};
use crate::frontend::onnx::{names, versions};
use bytes::Bytes;
use ckpt_passes::ir::op::{Domain, body_of};
use ckpt_passes::ir::{Attr, Data, External, Graph, NodeId, Tensor, Ty};
use ckpt_passes::text::parse_dim_param;
use ckpt_passes::transform::joint::trained;
use ckpt_passes::transform::remat::role_word;
use ckpt_passes::{Error, Result};
use prost::Message;
use std::collections::BTreeMap;

/// The lowest opset we write.
pub const LEAST_OPSET: i64 = 18;
/// The highest opset we write: that of the op table.
pub const GREATEST_OPSET: i64 = 23;
const LEAST_IR: i64 = 10;
/// Version of our own domain.
const CKPT_VERSION: i64 = 1;

/// Where weights go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Into the model file.
    Inside,
    /// Into one file beside it, of this name.
    Sidecar(String),
    /// Mapped weights stay where they are; others go into the model file.
    Linked,
}

/// What is to be written.
pub struct Package {
    pub model: ModelProto,
    /// Content of the sidecar: slices with the offset each starts at.
    pub sidecar: Vec<(u64, Bytes)>,
}

/// Alignment of weights in a sidecar: what kernels and mapped reads like.
const ALIGN_BYTES: u64 = 64;
/// Smaller tensors stay in the model file: they are shape constants that readers want at hand.
const LEAST_SIDECAR_BYTES: u64 = 1024;

/// Builds the file of a typed graph.
///
/// # Errors
/// A graph that ONNX cannot say: our bug.
pub fn package(graph: &Graph, weights: &Weights) -> Result<Package> {
    let mut file = GraphProto {
        name: Some(graph.name.clone()),
        ..GraphProto::default()
    };
    let mut sidecar = Vec::new();
    let mut end: u64 = 0;
    for input in graph.inputs() {
        file.input.push(value_info(
            &graph.value(*input).name,
            graph.value(*input).ty.as_ref(),
        ));
    }
    let trained = trained(graph);
    for (id, value) in graph.inits() {
        let Some(tensor) = value.tensor() else {
            continue;
        };
        file.initializer.push(initializer(
            &value.name,
            tensor,
            weights,
            &mut sidecar,
            &mut end,
        ));
        if trained.contains_key(&id) {
            file.input.push(value_info(&value.name, value.ty.as_ref()));
        }
        if let Some(origin) = graph.origins.get(&id) {
            let mut info = value_info(&value.name, value.ty.as_ref());
            let names = serde_json::to_string(&origin.names)
                .map_err(|e| Error::bug("json", e.to_string()))?;
            info.metadata_props.push(prop(names::OUR_NAMES, &names));
            info.metadata_props
                .push(prop(names::OUR_TRANSPOSED, &origin.transposed.to_string()));
            if let Some(is_parameter) = origin.is_parameter {
                info.metadata_props
                    .push(prop(names::OUR_PARAMETER, &is_parameter.to_string()));
            }
            if origin.frozen {
                info.metadata_props.push(prop(names::OUR_FROZEN, "true"));
            }
            file.value_info.push(info);
        }
    }
    let mut functions = Functions::default();
    let mut opset = needed_opset(graph).max(LEAST_OPSET);
    for id in graph.order() {
        let node = graph.node(*id);
        let message = match node.op.domain {
            Domain::Onnx { .. } => self::node(graph, *id, "", node.op.name)?,
            Domain::Ckpt => {
                let name = functions.of(graph, *id, &mut opset)?;
                self::node(graph, *id, Domain::CKPT, &name)?
            }
            Domain::Opaque => opaque(graph, *id)?,
        };
        file.node.push(described(graph, *id, message)?);
        for out in &node.outs {
            if !graph.is_output(*out) {
                file.value_info.push(value_info(
                    &graph.value(*out).name,
                    graph.value(*out).ty.as_ref(),
                ));
            }
        }
    }
    for output in graph.outputs() {
        file.output.push(value_info(
            &graph.value(*output).name,
            graph.value(*output).ty.as_ref(),
        ));
    }
    let opset = opset_for_foreign(graph, opset)?;
    let mut imports = vec![opset_import("", opset)];
    if !functions.list.is_empty() {
        imports.push(opset_import(Domain::CKPT, CKPT_VERSION));
    }
    for (domain, version) in foreign_domains(graph)? {
        imports.push(opset_import(domain, version));
    }
    for function in &mut functions.list {
        // A function's opset must agree with the model's.
        function.opset_import = vec![opset_import("", opset)];
    }
    let ir = graph
        .meta
        .get("ir_version")
        .and_then(|v| v.parse().ok())
        .unwrap_or(LEAST_IR)
        .max(LEAST_IR);
    let own = ["ir_version", "producer"];
    let props = graph
        .meta
        .iter()
        .filter(|(k, _)| !own.contains(&k.as_str()))
        .map(|(k, v)| prop(k, v))
        .collect();
    let model = ModelProto {
        ir_version: Some(ir),
        opset_import: imports,
        producer_name: Some("ckpt-opt".into()),
        producer_version: Some(env!("CARGO_PKG_VERSION").into()),
        graph: Some(file),
        functions: functions.list,
        metadata_props: props,
        ..ModelProto::default()
    };
    Ok(Package { model, sidecar })
}

/// Nodes that travel through, with the domain and version they were read under.
fn foreign(graph: &Graph) -> impl Iterator<Item = (NodeId, &str, i64)> {
    graph
        .nodes()
        .filter(|(_, n)| n.op.domain == Domain::Opaque)
        .map(|(id, n)| {
            let domain = n.attrs.opt_str("domain").unwrap_or("");
            (id, domain, n.attrs.opt_int("version").unwrap_or(1))
        })
}

/// Foreign domains with their versions.
fn foreign_domains(graph: &Graph) -> Result<BTreeMap<&str, i64>> {
    let mut versions = BTreeMap::new();
    for (id, domain, version) in foreign(graph).filter(|(_, d, _)| !d.is_empty()) {
        if *versions.entry(domain).or_insert(version) != version {
            return Err(Error::model(
                "opset",
                format!("domain \"{domain}\" is used in two versions"),
            )
            .at(graph.describe(id)));
        }
    }
    Ok(versions)
}

/// The lowest opset from `least` up in which every unknown standard op means what it meant in the file it is from.
fn opset_for_foreign(graph: &Graph, least: i64) -> Result<i64> {
    let mut blocking = None;
    for opset in least..=GREATEST_OPSET {
        blocking = foreign(graph)
            .filter(|(_, d, _)| d.is_empty())
            .find(|(id, _, version)| {
                let op = graph.node(*id).attrs.opt_str("op_type").unwrap_or("");
                let defined = versions::since(op, *version);
                defined.is_some() && defined != versions::since(op, opset)
            });
        if blocking.is_none() {
            return Ok(opset);
        }
    }
    let (id, version) = blocking.map_or((None, 0), |(id, _, v)| (Some(id), v));
    let place = id.map_or(String::new(), |id| graph.describe(id));
    Err(Error::model(
        "opset",
        "an op that ckpt-opt does not know changed its meaning between opsets",
    )
    .at(place)
    .expected(format!(
        "the form of opset {version} in opset {least} to {GREATEST_OPSET}"
    ))
    .help("export the model at opset 18 or newer"))
}

/// Functions written so far; equal bodies share one.
#[derive(Default)]
struct Functions {
    list: Vec<FunctionProto>,
    by_body: BTreeMap<Vec<u8>, String>,
    counts: BTreeMap<&'static str, usize>,
}

impl Functions {
    fn of(&mut self, graph: &Graph, id: NodeId, opset: &mut i64) -> Result<String> {
        let node = graph.node(id);
        let Some(body) = body_of(graph, id) else {
            return Err(
                Error::bug("body", format!("{} has no body", node.op.name)).at(graph.describe(id))
            );
        };
        let body = body.map_err(|e| e.at(format!("the body of {}", graph.describe(id))))?;
        *opset = (*opset).max(needed_opset(&body));
        let mut made = function(&body, node.op.name, node)?;
        let key = made.encode_to_vec();
        if let Some(name) = self.by_body.get(&key) {
            return Ok(name.clone());
        }
        let count = self.counts.entry(node.op.name).or_insert(0);
        *count += 1;
        let name = format!("{}_{count}", node.op.name);
        made.name = Some(name.clone());
        self.list.push(made);
        self.by_body.insert(key, name.clone());
        Ok(name)
    }
}

fn prop(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto {
        key: Some(key.into()),
        value: Some(value.into()),
    }
}

/// A node without metadata.
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

/// A foreign node as it was read, with the operands and results it has now.
fn opaque(graph: &Graph, id: NodeId) -> Result<NodeProto> {
    let raw = graph
        .node(id)
        .attrs
        .opt_tensor("node")
        .and_then(Tensor::bytes);
    let raw = raw.ok_or_else(|| {
        Error::bug("opaque", "a foreign node without its message").at(graph.describe(id))
    })?;
    let mut message =
        NodeProto::decode(raw.clone()).map_err(|e| Error::bug("opaque", e.to_string()))?;
    let current = node(graph, id, message.domain(), message.op_type())?;
    (message.input, message.output, message.name) = (current.input, current.output, current.name);
    message.metadata_props.clear();
    Ok(message)
}

/// Adds what the node is, for readers of the file and for our own reader.
fn described(graph: &Graph, id: NodeId, mut message: NodeProto) -> Result<NodeProto> {
    let node = graph.node(id);
    let mut meta = node.meta.clone();
    meta.insert("ckpt.role".into(), role_word(node).into());
    if let Some(original) = node.recompute_of {
        meta.insert("ckpt.of".into(), graph.node(original).name.clone());
    }
    if let Some(segment) = node.segment {
        meta.insert("ckpt.segment".into(), segment.to_string());
    }
    if !node.loc.node.is_empty() && node.loc.node != node.name {
        meta.insert(names::OUR_SOURCE.into(), node.loc.node.clone());
    }
    let told = meta.contains_key("pkg.torch.onnx.name_scopes");
    if !node.loc.scopes.is_empty() && !told && !node.name.starts_with('/') {
        let scopes = serde_json::to_string(&node.loc.scopes)
            .map_err(|e| Error::bug("json", e.to_string()))?;
        meta.insert(names::OUR_SCOPES.into(), scopes);
    }
    message.metadata_props = meta.iter().map(|(k, v)| prop(k, v)).collect();
    Ok(message)
}

/// A `Constant` node, for function bodies, which have no initializers.
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

fn attribute(name: &str, value: &Attr) -> Result<AttributeProto> {
    let mut message = AttributeProto {
        name: Some(name.into()),
        ..AttributeProto::default()
    };
    let kind = match value {
        Attr::Int(v) => {
            message.i = Some(*v);
            AttributeType::Int
        }
        Attr::Float(v) => {
            message.f = Some(*v);
            AttributeType::Float
        }
        Attr::Str(v) => {
            message.s = Some(v.clone().into_bytes());
            AttributeType::String
        }
        Attr::Ints(v) => {
            message.ints = v.clone();
            AttributeType::Ints
        }
        Attr::Floats(v) => {
            message.floats = v.clone();
            AttributeType::Floats
        }
        Attr::Strs(v) => {
            message.strings = v.iter().map(|s| s.clone().into_bytes()).collect();
            AttributeType::Strings
        }
        Attr::DType(v) => {
            message.i = Some(i64::from(v.onnx_code()));
            AttributeType::Int
        }
        Attr::Tensor(v) => {
            let Some(bytes) = v.bytes() else {
                return Err(Error::bug(
                    "attribute",
                    format!("the content of attribute `{name}` is absent"),
                ));
            };
            message.t = Some(inline("", v, bytes.clone()));
            AttributeType::Tensor
        }
    };
    message.r#type = Some(kind as i32);
    Ok(message)
}

fn inline(name: &str, tensor: &Tensor, bytes: Bytes) -> TensorProto {
    TensorProto {
        raw_data: Some(bytes),
        ..header(name, tensor)
    }
}

fn header(name: &str, tensor: &Tensor) -> TensorProto {
    TensorProto {
        name: (!name.is_empty()).then(|| name.to_string()),
        dims: tensor.dims.iter().map(|d| *d as i64).collect(),
        data_type: Some(tensor.dtype.onnx_code()),
        ..TensorProto::default()
    }
}

fn external(name: &str, tensor: &Tensor, place: &External) -> TensorProto {
    TensorProto {
        data_location: Some(DataLocation::External as i32),
        external_data: vec![
            prop("location", &place.location),
            prop("offset", &place.offset.to_string()),
            prop("length", &place.length.to_string()),
        ],
        ..header(name, tensor)
    }
}

fn initializer(
    name: &str,
    tensor: &Tensor,
    weights: &Weights,
    sidecar: &mut Vec<(u64, Bytes)>,
    end: &mut u64,
) -> TensorProto {
    match (&tensor.data, weights) {
        (Data::Absent(place), _) => external(name, tensor, place),
        (
            Data::Here {
                origin: Some(place),
                ..
            },
            Weights::Linked,
        ) => external(name, tensor, place),
        (Data::Here { bytes, .. }, Weights::Sidecar(location))
            if bytes.len() as u64 >= LEAST_SIDECAR_BYTES =>
        {
            let offset = end.next_multiple_of(ALIGN_BYTES);
            *end = offset + bytes.len() as u64;
            sidecar.push((offset, bytes.clone()));
            external(
                name,
                tensor,
                &External {
                    location: location.as_str().into(),
                    offset,
                    length: bytes.len() as u64,
                },
            )
        }
        (Data::Here { bytes, .. }, _) => inline(name, tensor, bytes.clone()),
    }
}

fn value_info(name: &str, ty: Option<&Ty>) -> ValueInfoProto {
    let tensor = ty.map(|ty| {
        let dims = ty.dims.iter().map(|d| Dimension {
            denotation: None,
            value: match (d.as_const(), d.as_symbol()) {
                (Some(n), _) => Some(dimension::Value::DimValue(n)),
                (_, Some(name)) => Some(dimension::Value::DimParam(name.to_string())),
                // As exporters write expressions; one that would not be read back as itself is left out: any size fits.
                _ => Some(d.to_string())
                    .filter(|text| parse_dim_param(text) == *d)
                    .map(dimension::Value::DimParam),
            },
        });
        type_proto::Tensor {
            elem_type: Some(ty.dtype.onnx_code()),
            shape: Some(TensorShapeProto {
                dim: dims.collect(),
            }),
        }
    });
    ValueInfoProto {
        name: Some(name.into()),
        r#type: tensor.map(|t| TypeProto {
            denotation: None,
            value: Some(type_proto::Value::TensorType(t)),
        }),
        ..ValueInfoProto::default()
    }
}
