//! The model with new weights, as an ONNX file.
//!
//! An ONNX model keeps its nodes, opset and metadata as they are: only contents of initializers change. Where the reader
//! computed parameters that the file lacks (an exporter folded or merged them), and for other formats, the graph as it was
//! read is written.

use crate::emit::save::{INSIDE_LIMIT_BYTES, Saving, WeightOptions, save, save_model};
use crate::frontend::onnx::{Onnx, external, file, tensor};
use crate::frontend::{Frontend, file::read_head};
use crate::onnx::proto::{AttributeProto, GraphProto, TensorProto, tensor_proto::DataLocation};
use ckpt_passes::Result;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::ir::{Graph, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Writes the model at `source` with the weights of `graph`, which was read from it. Returns the written files.
///
/// # Errors
/// See [`save`].
pub fn write(source: &Path, graph: &Graph, output: &Path) -> Result<Vec<PathBuf>> {
    let how = Saving {
        input: Some(source),
        weights: WeightOptions::default(),
        inside_limit_bytes: INSIDE_LIMIT_BYTES,
    };
    if Onnx.recognises(source, &read_head(source)?) {
        let model = file::open(source)?;
        if let Some(own) = model.graph.as_ref()
            && holds_all(own, graph)?
        {
            let tensors = replaced(source, own, graph)?;
            return save_model(model, &tensors, output, &how);
        }
    }
    save(graph, output, &how)
}

/// Returns true if the file has every parameter of the graph as an initializer, and its other external data is none.
fn holds_all(file: &GraphProto, graph: &Graph) -> Result<bool> {
    let names: BTreeSet<&str> = file.initializer.iter().map(TensorProto::name).collect();
    let parameters = parameters(graph, &Selection::default())?;
    let mut parameters = parameters
        .iter()
        .map(|p| graph.value(p.value).name.as_str());
    let attributes = file.node.iter().flat_map(|node| &node.attribute);
    Ok(parameters.all(|name| names.contains(name)) && !attributes.into_iter().any(is_external))
}

/// Returns true if an attribute holds a tensor in another file, at any depth.
fn is_external(attribute: &AttributeProto) -> bool {
    let is_outside = |t: &TensorProto| t.data_location() == DataLocation::External;
    let mut tensors = attribute.t.iter().chain(&attribute.tensors);
    let mut graphs = attribute.g.iter().chain(&attribute.graphs);
    tensors.any(is_outside)
        || graphs.any(|graph| {
            let mut inside = graph.node.iter().flat_map(|node| &node.attribute);
            graph.initializer.iter().any(is_outside) || inside.any(is_external)
        })
}

/// Returns the contents of all initializers of the file: those of the graph where it has them.
fn replaced(source: &Path, file: &GraphProto, graph: &Graph) -> Result<Vec<Tensor>> {
    let inits = graph.inits();
    let own: BTreeMap<&str, &Tensor> = inits
        .filter_map(|(_, value)| Some((value.name.as_str(), value.tensor()?)))
        .collect();
    let mut files = external::Files::beside(source);
    let tensors = file
        .initializer
        .iter()
        .map(|old| match own.get(old.name()) {
            Some(tensor) => Ok((*tensor).clone()),
            None => tensor::read(old, &mut files),
        });
    tensors.collect()
}
