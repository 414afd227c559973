//! Reads the module scopes of nodes and the framework's names of parameters.
//!
//! The dynamo exporter writes metadata (`pkg.torch.onnx.*`): module paths and classes of nodes, and what [`exported`]
//! reads about parameters. The legacy exporter writes module paths into the names of nodes. All of it is optional. It
//! selects layers and parameters by name and appears in reports.
//!
//! [`exported`]: super::exported

use super::exported::{Export, SCOPES, holds_one_number, python_strings};
use super::{legacy, restored};
use crate::onnx::keys;
use crate::onnx::proto::{GraphProto, ModelProto, NodeProto, to_map};
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, Loc, Origin, ValueId};
use std::collections::BTreeMap;

const CLASSES: &str = "pkg.torch.onnx.class_hierarchy";

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

/// Fills `graph.origins` for every initializer that the file describes, and undoes what can be undone of an exporter's
/// folding. Returns warnings about the parameters that cannot be trained.
///
/// # Errors
/// See [`restored::restore`].
pub fn origins(graph: &mut Graph, model: &ModelProto, file: &GraphProto) -> Result<Vec<String>> {
    let export = Export::read(model, file);
    let ids: BTreeMap<String, ValueId> =
        graph.inits().map(|(id, v)| (v.name.clone(), id)).collect();
    for (name, id) in &ids {
        if let Some(origin) = export.origin(name, graph.ty(*id).rank()) {
            graph.origins.insert(*id, origin);
        }
    }
    for (initializer, names) in export.aliases(file) {
        let origin = ids
            .get(initializer)
            .and_then(|id| graph.origins.get_mut(id));
        if let Some(origin) = origin.filter(|o| !o.names.is_empty()) {
            origin.names.extend(names.into_iter().map(str::to_string));
        }
    }
    for info in &file.value_info {
        let origin = our_origin(&to_map(&info.metadata_props));
        if let (Some(id), Some(origin)) = (ids.get(info.name()), origin) {
            graph.origins.insert(*id, origin);
        }
    }
    literals(graph, file, &ids);
    legacy::names(graph, file);
    let assumed = restored::restore(graph, &export)?;
    disown(graph);
    Ok(restored::warnings(graph, &export, &assumed))
}

/// Renames initializers that are called after the parameter that an exporter folded into them, for only the parameter itself
/// has its name.
fn disown(graph: &mut Graph) {
    let folded: Vec<ValueId> = graph.origins.keys().copied().collect();
    for id in folded {
        let name = graph.value(id).name.clone();
        if graph.origins[&id].folded_from.contains(&name) {
            graph.rename_value(id, &format!("{name}.folded"));
        }
    }
}

/// Marks `Constant` nodes that repeat one number as no parameters. Exporters write them for operands that the model does
/// not have, such as the bias of a norm. Parameters are initializers, or hold different numbers.
fn literals(graph: &mut Graph, file: &GraphProto, ids: &BTreeMap<String, ValueId>) {
    for node in file.node.iter().filter(|n| n.op_type() == "Constant") {
        let Some(id) = node.output.first().and_then(|name| ids.get(name)) else {
            continue;
        };
        let value = graph.value(*id);
        let tensor = value.tensor().filter(|t| t.elements() > 1);
        let repeats = tensor.is_some_and(holds_one_number);
        if repeats && value.ty().dtype.is_float() && !graph.origins.contains_key(id) {
            let origin = Origin::constant(&value.name);
            graph.origins.insert(*id, origin);
        }
    }
}

fn our_origin(props: &BTreeMap<String, String>) -> Option<Origin> {
    let names = serde_json::from_str(props.get(keys::NAMES)?).ok()?;
    Some(Origin {
        names,
        transposed: props.get(keys::TRANSPOSED).is_some_and(|t| t == "true"),
        is_parameter: props.get(keys::PARAMETER).map(|p| p == "true"),
        is_persistent: props.get(keys::PERSISTENT).is_some_and(|p| p == "true"),
        frozen: props.get(keys::FROZEN).is_some_and(|f| f == "true"),
        folded_from: props
            .get(keys::FOLDED_FROM)
            .and_then(|list| serde_json::from_str(list).ok())
            .unwrap_or_default(),
    })
}
