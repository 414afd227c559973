//! [`Graph`] to `ModelProto`: a valid ONNX file, nodes in schedule order.
//!
//! The opset is the lowest that the graph needs, at least 18. The IR version is 10, or that of the file that was read if it
//! is higher. Ops of our own become calls of model-local functions named `<Op>_<n>`; nodes with equal bodies share one.
//! String metadata says what every node is (see [`keys`]). Initializers are no graph inputs, unless
//! [`Package::declare_trained`] makes them so. Weights are not copied: bytes are shared with the mapped file they come from.

use crate::onnx::keys;
use crate::onnx::messages::{function, header, inline, needed_opset, node, opset_import};
use crate::onnx::proto::{
    FunctionProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto,
    tensor_proto::DataLocation,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};
use crate::onnx::versions::{self, GREATEST_OPSET, LEAST_OPSET};
use bytes::Bytes;
use ckpt_passes::analysis::gradients::{framework_names, trained};
use ckpt_passes::ir::op::{Body, Domain};
use ckpt_passes::ir::{Data, External, Graph, NodeId, Tensor, Ty, ValueId};
use ckpt_passes::ops::collective::is_of_ranks;
use ckpt_passes::ops::{body_of, first_opset};
use ckpt_passes::text::parse_dim_param;
use ckpt_passes::transform::remat::role_word;
use ckpt_passes::{Error, Result};
use prost::Message;
use std::collections::BTreeMap;

const LEAST_IR: i64 = 10;
/// Version of our own domain.
const CKPT_VERSION: i64 = 1;

/// The place of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Into the model file.
    Inside,
    /// Into one file beside it, of this name.
    Sidecar(String),
    /// Mapped weights stay where they are; others go into the model file.
    Linked,
}

/// The content of the files to write.
pub struct Package {
    /// Content of the model file; weights in other files are references there.
    pub model: ModelProto,
    /// Content of the sidecar: slices with their offsets in bytes.
    pub sidecar: Vec<(u64, Bytes)>,
}

impl Package {
    /// Lists the trained initializers of `graph` among the inputs too, so that a caller can override them.
    pub fn declare_trained(&mut self, graph: &Graph) {
        let trained = trained(graph);
        self.declare(graph, |id| trained.contains_key(&id));
    }

    /// Adds the initializers of `graph` that `wanted` accepts to the inputs.
    pub fn declare(&mut self, graph: &Graph, wanted: impl Fn(ValueId) -> bool) {
        let inits = graph.inits().map(|(id, _)| id);
        let inputs = inits.filter(|id| wanted(*id));
        if let Some(file) = &mut self.model.graph {
            file.input.extend(inputs.map(|id| value_info(graph, id)));
        }
    }
}

/// Alignment of weights in a sidecar, for kernels and mapped reads.
const ALIGN_BYTES: u64 = 64;
/// Smaller tensors stay in the model file, because they are shape constants that readers need.
const LEAST_SIDECAR_BYTES: u64 = 1024;

/// Builds the ONNX file of a typed graph.
///
/// # Errors
/// A graph that ONNX cannot say: our bug.
pub fn package(graph: &Graph, weights: &Weights) -> Result<Package> {
    package_up_to(graph, weights, GREATEST_OPSET)
}

/// As [`package`]. Standard ops that are younger than `greatest_opset` become calls of functions, where they have a body.
///
/// # Errors
/// See [`package`].
pub fn package_up_to(graph: &Graph, weights: &Weights, greatest_opset: i64) -> Result<Package> {
    // Ops that are written as calls of functions. The body of a function describes one process, so what ranks
    // compute together stays an op.
    let is_call = |id: NodeId| {
        let node = graph.node(id);
        let op = node.op;
        let is_absent = op.domain == Domain::Ckpt || first_opset(graph, id) > greatest_opset;
        is_absent && matches!(op.body, Body::Function(_)) && !is_of_ranks(node)
    };
    let mut file = GraphProto {
        name: Some(graph.name.clone()),
        ..GraphProto::default()
    };
    let mut sidecar = Vec::new();
    let mut end: u64 = 0;
    for input in graph.inputs() {
        file.input.push(value_info(graph, *input));
    }
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
        if let Some(origin) = graph.origins.get(&id) {
            let mut info = value_info(graph, id);
            let mut tell = |key, value: &str| {
                let prop = StringStringEntryProto::new(key, value);
                info.metadata_props.push(prop);
            };
            tell(keys::NAMES, &json(&origin.names)?);
            tell(keys::TRANSPOSED, &origin.transposed.to_string());
            if let Some(is_parameter) = origin.is_parameter {
                tell(keys::PARAMETER, &is_parameter.to_string());
            }
            if origin.is_persistent {
                tell(keys::PERSISTENT, "true");
            }
            if origin.frozen {
                tell(keys::FROZEN, "true");
            }
            if !origin.folded_from.is_empty() {
                tell(keys::FOLDED_FROM, &json(&origin.folded_from)?);
            }
            file.value_info.push(info);
        }
    }
    let mut functions = Functions::default();
    // Ops that no other runtime can run: they have no function.
    let mut has_bare = false;
    let standard = graph.nodes().map(|(id, _)| id).filter(|id| !is_call(*id));
    let opsets = standard.map(|id| first_opset(graph, id));
    let mut opset = opsets.fold(LEAST_OPSET, i64::max);
    for id in graph.order() {
        let node = graph.node(*id);
        let message = match node.op.domain {
            _ if is_call(*id) => {
                let name = functions.of(graph, *id, &mut opset)?;
                self::node(graph, *id, Domain::CKPT, &name)?
            }
            Domain::Onnx { .. } => self::node(graph, *id, "", node.op.name)?,
            Domain::Ckpt => {
                has_bare = true;
                self::node(graph, *id, Domain::CKPT, node.op.name)?
            }
            Domain::Opaque => opaque(graph, *id)?,
        };
        file.node.push(described(graph, *id, message)?);
        for out in &node.outs {
            if !graph.is_output(*out) {
                file.value_info.push(value_info(graph, *out));
            }
        }
    }
    let framework = framework_names(graph);
    for output in graph.outputs() {
        let mut info = value_info(graph, *output);
        if let Some(own) = framework(info.name()).filter(|own| own.name != info.name()) {
            info.metadata_props = vec![
                StringStringEntryProto::new(keys::NAMES, &json(&[own.name])?),
                StringStringEntryProto::new(keys::TRANSPOSED, &own.transposed.to_string()),
            ];
        }
        file.output.push(info);
    }
    let opset = opset_for_foreign(graph, opset)?;
    let mut imports = vec![opset_import("", opset)];
    if has_bare || !functions.list.is_empty() {
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
        .map(|(k, v)| StringStringEntryProto::new(k, v))
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

/// Puts tensors into the initializers of a model that was read, in their order. Everything else stays.
pub fn repackage(mut model: ModelProto, tensors: &[Tensor], weights: &Weights) -> Package {
    let (mut sidecar, mut end) = (Vec::new(), 0);
    let graph = model.graph.iter_mut();
    let initializers = graph.flat_map(|graph| &mut graph.initializer);
    for (old, tensor) in initializers.zip(tensors) {
        *old = TensorProto {
            doc_string: old.doc_string.take(),
            metadata_props: std::mem::take(&mut old.metadata_props),
            ..initializer(old.name(), tensor, weights, &mut sidecar, &mut end)
        };
    }
    Package { model, sidecar }
}

/// Returns the opaque nodes, with the domain and version under which they were read.
fn foreign(graph: &Graph) -> impl Iterator<Item = (NodeId, &str, i64)> {
    graph
        .nodes()
        .filter(|(_, n)| n.op.domain == Domain::Opaque)
        .map(|(id, n)| {
            let domain = n.attrs.opt_str("domain").unwrap_or("");
            (id, domain, n.attrs.opt_int("version").unwrap_or(1))
        })
}

/// Returns the foreign domains with their versions.
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

/// Returns the lowest opset from `least` up in which every unknown standard op keeps the meaning it has in its file.
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

/// The functions written so far.
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

/// Writes a foreign node as it was read, with its present operands and results.
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

/// Adds metadata about the node, for people and for our own reader.
fn described(graph: &Graph, id: NodeId, mut message: NodeProto) -> Result<NodeProto> {
    let node = graph.node(id);
    let mut meta = node.meta.clone();
    meta.insert(keys::ROLE.into(), role_word(node).into());
    if let Some(original) = node.recompute_of {
        meta.insert(keys::OF.into(), graph.node(original).name.clone());
    }
    if let Some(segment) = node.segment {
        meta.insert(keys::SEGMENT.into(), segment.to_string());
    }
    if !node.loc.node.is_empty() && node.loc.node != node.name {
        meta.insert(keys::SOURCE.into(), node.loc.node.clone());
    }
    let told = meta.contains_key("pkg.torch.onnx.name_scopes");
    if !node.loc.scopes.is_empty() && !told && !node.name.starts_with('/') {
        meta.insert(keys::SCOPES.into(), json(&node.loc.scopes)?);
    }
    message.metadata_props = meta
        .iter()
        .map(|(k, v)| StringStringEntryProto::new(k, v))
        .collect();
    Ok(message)
}

fn external(name: &str, tensor: &Tensor, place: &External) -> TensorProto {
    TensorProto {
        data_location: Some(DataLocation::External as i32),
        external_data: vec![
            StringStringEntryProto::new("location", &place.location),
            StringStringEntryProto::new("offset", &place.offset.to_string()),
            StringStringEntryProto::new("length", &place.length.to_string()),
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

fn json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::bug("json", e.to_string()))
}

/// Writes name and type of a value.
fn value_info(graph: &Graph, id: ValueId) -> ValueInfoProto {
    let value = graph.value(id);
    let tensor = value.ty.as_ref().map(|ty: &Ty| {
        let dims = ty.dims.iter().map(|d| Dimension {
            denotation: None,
            value: match (d.as_const(), d.as_symbol()) {
                (Some(n), _) => Some(dimension::Value::DimValue(n)),
                (_, Some(name)) => Some(dimension::Value::DimParam(name.to_string())),
                // Exporters write expressions like this. One that would be read back as another stays out; any size fits.
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
        name: Some(value.name.clone()),
        r#type: tensor.map(|t| TypeProto {
            denotation: None,
            value: Some(type_proto::Value::TensorType(t)),
        }),
        ..ValueInfoProto::default()
    }
}
