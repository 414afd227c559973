//! Reads the module scopes of nodes and the framework's names of parameters.
//!
//! The dynamo exporter writes metadata (`pkg.torch.onnx.*`): module paths and classes of nodes, kinds of initializers, and
//! the parameter of each folded weight. The legacy exporter writes module paths into the names of nodes. All of it is
//! optional. It selects layers and parameters by name and appears in reports, but no result depends on it.

use super::legacy;
use crate::onnx::keys;
use crate::onnx::proto::{GraphProto, ModelProto, NodeProto, to_map};
use ckpt_passes::ir::op::OpClass;
use ckpt_passes::ir::{Graph, Loc, Origin, Use, ValueId};
use std::collections::{BTreeMap, BTreeSet};

const SCOPES: &str = "pkg.torch.onnx.name_scopes";
const CLASSES: &str = "pkg.torch.onnx.class_hierarchy";
const FX_NODE: &str = "pkg.torch.onnx.fx_node";
const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";
const FOLDED_FROM: &str = "pkg.onnxscript.optimizer.folded_from";
const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";

/// Returns the location of a node in the model: its name there, and its modules with classes.
pub fn loc(node: &NodeProto, props: &BTreeMap<String, String>) -> Loc {
    let source = props
        .get(keys::SOURCE)
        .cloned()
        .unwrap_or_else(|| node.name().to_string());
    if let Some(scopes) = props.get(keys::SCOPES) {
        let scopes: Vec<(String, Option<String>)> =
            serde_json::from_str(scopes).unwrap_or_default();
        return Loc {
            node: source,
            scopes,
        };
    }
    if let Some(scopes) = props.get(SCOPES) {
        let paths = python_strings(scopes);
        let classes = props
            .get(CLASSES)
            .map(|c| python_strings(c))
            .unwrap_or_default();
        // The last entry is the traced operation, not a module.
        let modules = paths.len().saturating_sub(1);
        let class = |i: usize| {
            classes
                .get(i)
                .and_then(|c| c.rsplit('.').next())
                .map(str::to_string)
        };
        let scopes = paths
            .into_iter()
            .take(modules)
            .enumerate()
            .map(|(i, p)| (p, class(i)))
            .collect();
        return Loc {
            node: source,
            scopes,
        };
    }
    // Legacy exports: `/model/layers.0/self_attn/MatMul`.
    let mut scopes = Vec::new();
    if let Some(path) = source.strip_prefix('/') {
        let parts: Vec<&str> = path.split('/').collect();
        for end in 1..parts.len() {
            scopes.push((parts[..end].join("."), None));
        }
    }
    Loc {
        node: source,
        scopes,
    }
}

/// Returns the location of a node inside calls of local functions. A call counts as a module of the function's class.
pub fn within(calls: &[(String, String)], mut loc: Loc) -> Loc {
    for (depth, (path, class)) in calls.iter().enumerate() {
        match loc.scopes.iter_mut().find(|(p, _)| p == path) {
            Some((_, known)) => {
                known.get_or_insert_with(|| class.clone());
            }
            None => loc
                .scopes
                .insert(depth, (path.clone(), Some(class.clone()))),
        }
    }
    loc
}

/// Returns the strings of a Python list literal such as `['', 'model', "it's"]`.
pub fn python_strings(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut chars = text.chars();
    while let Some(quote) = chars.find(|c| *c == '\'' || *c == '"') {
        let mut item = String::new();
        while let Some(c) = chars.next() {
            match c {
                c if c == quote => break,
                '\\' => item.extend(chars.next()),
                c => item.push(c),
            }
        }
        found.push(item);
    }
    found
}

/// The exporter's graph signature.
struct Signature {
    /// The names of parameters by their traced names: `p_model_norm_weight` is `model.norm.weight`.
    parameters: BTreeMap<String, String>,
}

fn signature(model: &ModelProto, file: &GraphProto) -> Signature {
    let mut parameters = BTreeMap::new();
    let props = file.metadata_props.iter().chain(&model.metadata_props);
    for prop in props.filter(|p| p.key() == SIGNATURE) {
        for line in prop.value().lines() {
            let Some((traced, rest)) = line.trim().split_once(": PARAMETER target=") else {
                continue;
            };
            if let Some(name) = python_strings(rest).into_iter().next() {
                parameters.insert(traced.to_string(), name);
            }
        }
    }
    Signature { parameters }
}

/// Fills `graph.origins` for every initializer that the file describes.
pub fn origins(graph: &mut Graph, model: &ModelProto, file: &GraphProto) {
    let signature = signature(model, file);
    let real: BTreeSet<&str> = signature.parameters.values().map(String::as_str).collect();
    let ids: BTreeMap<String, ValueId> =
        graph.inits().map(|(id, v)| (v.name.clone(), id)).collect();
    for info in &file.value_info {
        let Some(id) = ids.get(info.name()).copied() else {
            continue;
        };
        let props = to_map(&info.metadata_props);
        if let Some(origin) =
            our_origin(&props).or_else(|| exporter_origin(graph, id, &props, &real))
        {
            graph.origins.insert(id, origin);
        }
    }
    aliases(graph, file, &signature);
    literals(graph, file, &ids);
    legacy::names(graph, file);
}

/// Marks `Constant` nodes that repeat one number as no parameters. Exporters write them for operands that the model does
/// not have, such as the bias of a norm. Parameters are initializers, or hold different numbers.
fn literals(graph: &mut Graph, file: &GraphProto, ids: &BTreeMap<String, ValueId>) {
    for node in file.node.iter().filter(|n| n.op_type() == "Constant") {
        let Some(id) = node.output.first().and_then(|name| ids.get(name)) else {
            continue;
        };
        let value = graph.value(*id);
        let size = value.ty().dtype.size_bytes() as usize;
        let bytes = value.tensor().and_then(|t| t.bytes());
        let repeats = bytes.is_some_and(|b| b.len() > size && b[size..] == b[..b.len() - size]);
        if repeats && value.ty().dtype.is_float() && !graph.origins.contains_key(id) {
            let origin = named(value.name.clone(), false);
            graph.origins.insert(*id, origin);
        }
    }
}

/// Returns the origin of an initializer with a name of its own.
fn named(name: String, is_parameter: bool) -> Origin {
    Origin {
        names: vec![name],
        is_parameter: Some(is_parameter),
        ..Origin::default()
    }
}

fn our_origin(props: &BTreeMap<String, String>) -> Option<Origin> {
    let names = serde_json::from_str(props.get(keys::NAMES)?).ok()?;
    Some(Origin {
        names,
        transposed: props.get(keys::TRANSPOSED).is_some_and(|t| t == "true"),
        is_parameter: props.get(keys::PARAMETER).map(|p| p == "true"),
        frozen: props.get(keys::FROZEN).is_some_and(|f| f == "true"),
    })
}

fn exporter_origin(
    graph: &Graph,
    id: ValueId,
    props: &BTreeMap<String, String>,
    real: &BTreeSet<&str>,
) -> Option<Origin> {
    let name = graph.value(id).name.clone();
    if let Some(kind) = props.get(KIND) {
        return Some(named(name, kind == "PARAMETER"));
    }
    let sources = python_strings(props.get(FOLDED_FROM)?);
    let [source] = sources.as_slice() else {
        return None;
    };
    let is_parameter = match (real.is_empty(), real.contains(source.as_str())) {
        (false, known) => Some(known),
        (true, _) => None,
    };
    if is_parameter != Some(true) && !source.contains('.') {
        return None;
    }
    // The weight of a linear layer is [out, in], and the exporter folds the transpose for MatMul into it. The table of an
    // embedding keeps its layout.
    let value = graph.value(id);
    let multiplies = |u: &Use| graph.node(u.node).op.class == OpClass::Product;
    let transposed = value.ty().rank() == 2 && value.uses().iter().any(multiplies);
    Some(Origin {
        names: vec![source.clone()],
        transposed,
        is_parameter,
        frozen: false,
    })
}

/// Finds the other names of tied weights. The file stores such a weight under one name. The traced name of another one still
/// occurs in the metadata of nodes that read the weight.
fn aliases(graph: &mut Graph, file: &GraphProto, signature: &Signature) {
    let mut answered: BTreeSet<String> = graph
        .origins
        .values()
        .flat_map(|o| o.names.iter().cloned())
        .collect();
    answered.extend(graph.inits().map(|(_, v)| v.name.clone()));
    let missing: BTreeMap<&str, &str> = signature
        .parameters
        .iter()
        .filter(|(_, name)| !answered.contains(*name))
        .map(|(traced, name)| (traced.as_str(), name.as_str()))
        .collect();
    if missing.is_empty() {
        return;
    }
    let ids: BTreeMap<String, ValueId> =
        graph.inits().map(|(id, v)| (v.name.clone(), id)).collect();
    for node in &file.node {
        let Some(traced) = node.metadata_props.iter().find(|p| p.key() == FX_NODE) else {
            continue;
        };
        let weights: Vec<_> = node
            .input
            .iter()
            .filter_map(|n| ids.get(n).copied())
            .filter(|id| graph.value(*id).ty().dtype.is_float() && graph.value(*id).ty().rank() > 0)
            .collect();
        let [weight] = weights.as_slice() else {
            continue;
        };
        let mentioned: BTreeSet<&str> = traced
            .value()
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .collect();
        for (traced, name) in &missing {
            if mentioned.contains(traced) {
                let own = graph.value(*weight).name.clone();
                let origin = graph.origins.entry(*weight);
                let origin = origin.or_insert_with(|| named(own, true));
                if !origin.names.iter().any(|n| n == name) {
                    origin.names.push((*name).to_string());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::python_strings;

    #[test]
    fn list_literals() {
        assert_eq!(
            python_strings(r#"['', 'model.layers.0', "it's", 'a\'b']"#),
            ["", "model.layers.0", "it's", "a'b"]
        );
        assert!(python_strings("[]").is_empty());
    }
}
