//! Names of parameters in files of the legacy exporter, which writes no metadata about them.
//!
//! It folds the transpose of a linear layer's weight into an initializer `onnx::MatMul_424`. Weights with equal values are
//! stored once, with an `Identity` for each further name. The names of biases and the module paths in names of nodes still
//! tell the names of weights. A weight gets a name only if there is exactly one candidate.

use crate::onnx::proto::{GraphProto, NodeProto};
use ckpt_passes::ir::{Graph, Origin, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the names that the exporter gives to weights with a folded transpose.
const FOLDED: &str = "onnx::MatMul_";

/// Adds names to `graph.origins`: further names of shared initializers, and names of folded weights. The latter come from the
/// bias that is added to the product, or else from a scope with a single product.
pub fn names(graph: &mut Graph, file: &GraphProto) {
    let ids: BTreeMap<String, ValueId> =
        graph.inits().map(|(id, v)| (v.name.clone(), id)).collect();
    let shared = identities(&ids, file);
    let told: BTreeSet<ValueId> = graph.origins.keys().copied().collect();
    for (name, id) in &shared {
        let is_float = graph.value(*id).ty().dtype.is_float();
        if is_float && !told.contains(id) && name.contains('.') && !name.contains(['/', ':']) {
            add(graph, *id, name, false);
        }
    }
    let mut of_scope: BTreeMap<&str, usize> = BTreeMap::new();
    let products = || file.node.iter().filter(|n| n.op_type() == "MatMul");
    for scope in products().filter_map(scope_of) {
        *of_scope.entry(scope).or_insert(0) += 1;
    }
    let biases = biases(file, &ids);
    for node in products() {
        let Some(weight) = node.input.get(1) else {
            continue;
        };
        let Some(id) = ids.get(weight).or_else(|| shared.get(weight)).copied() else {
            continue;
        };
        let value = graph.value(id);
        let folded = value.name.starts_with(FOLDED) && value.ty().rank() == 2;
        if !folded || told.contains(&id) {
            continue;
        }
        let by_bias = biases.get(node.output.first().map_or("", String::as_str));
        let by_scope = scope_of(node)
            .filter(|scope| of_scope[scope] == 1)
            .map(|scope| format!("{}.weight", scope.replace('/', ".")));
        let name = by_bias.map(|stem| format!("{stem}weight")).or(by_scope);
        if let Some(name) = name.filter(|n| !ids.contains_key(n) && !shared.contains_key(n)) {
            add(graph, id, &name, true);
        }
    }
}

/// Adds a name of an initializer. The name of a folded weight in the file does not count as one.
fn add(graph: &mut Graph, id: ValueId, name: &str, transposed: bool) {
    let own = graph.value(id).name.clone();
    let origin = graph.origins.entry(id).or_insert_with(|| Origin {
        names: match own.starts_with(FOLDED) {
            true => Vec::new(),
            false => vec![own],
        },
        transposed,
        is_parameter: None,
        frozen: false,
    });
    if !origin.names.iter().any(|n| n == name) {
        origin.names.push(name.to_string());
    }
}

/// Returns the scope of a node: `enc/layers.0/linear1` for `/enc/layers.0/linear1/MatMul`.
fn scope_of(node: &NodeProto) -> Option<&str> {
    let path = node.name().strip_prefix('/')?;
    path.rsplit_once('/').map(|(scope, _)| scope)
}

/// Returns the results of `Identity` nodes that are initializers by another name.
fn identities(ids: &BTreeMap<String, ValueId>, file: &GraphProto) -> BTreeMap<String, ValueId> {
    let mut shared: BTreeMap<String, ValueId> = BTreeMap::new();
    for node in file.node.iter().filter(|n| n.op_type() == "Identity") {
        let (Some(from), Some(to)) = (node.input.first(), node.output.first()) else {
            continue;
        };
        if let Some(id) = ids.get(from).or_else(|| shared.get(from)).copied() {
            shared.insert(to.clone(), id);
        }
    }
    shared
}

/// Returns the bias that is added to each value, without its ending `bias`: `enc.layers.0.linear1.`,
/// `enc.self_attn.in_proj_`.
fn biases(file: &GraphProto, ids: &BTreeMap<String, ValueId>) -> BTreeMap<String, String> {
    let mut stems = BTreeMap::new();
    for node in file.node.iter().filter(|n| n.op_type() == "Add") {
        let [a, b] = node.input.as_slice() else {
            continue;
        };
        for (bias, value) in [(a, b), (b, a)] {
            if ids.contains_key(bias)
                && let Some(stem) = bias.strip_suffix("bias")
                && stem.ends_with(['.', '_'])
            {
                stems.insert(value.clone(), stem.to_string());
            }
        }
    }
    stems
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::ir::{DType, Tensor};

    fn node(op: &str, name: &str, ins: &[&str], out: &str) -> NodeProto {
        NodeProto {
            name: Some(name.into()),
            op_type: Some(op.into()),
            input: ins.iter().map(|i| i.to_string()).collect(),
            output: vec![out.into()],
            ..NodeProto::default()
        }
    }

    /// (initializer, the names it gets) of a graph with these initializers, `told` of which have a name already.
    fn found(nodes: Vec<NodeProto>, told: &[&str]) -> Vec<(String, Vec<String>)> {
        let mut graph = Graph::new("g");
        let weights = [
            "onnx::MatMul_1",
            "onnx::MatMul_2",
            "own.weight",
            "enc.0.attn.in_proj_bias",
        ];
        for weight in weights {
            let id = graph.add_init(weight, Tensor::new(DType::F32, [1, 1], vec![0; 4]));
            if told.contains(&weight) {
                let names = vec!["told".into()];
                let origin = Origin {
                    names,
                    transposed: true,
                    is_parameter: None,
                    frozen: false,
                };
                graph.origins.insert(id, origin);
            }
        }
        let file = GraphProto {
            node: nodes,
            ..GraphProto::default()
        };
        names(&mut graph, &file);
        let origins = graph.origins.iter();
        origins
            .map(|(id, o)| (graph.value(*id).name.clone(), o.names.clone()))
            .collect()
    }

    fn product(name: &str, weight: &str) -> NodeProto {
        node("MatMul", name, &["x", weight], "y")
    }

    fn named(initializer: &str, names: &[&str]) -> (String, Vec<String>) {
        let names = names.iter().map(|n| n.to_string()).collect();
        (initializer.to_string(), names)
    }

    #[test]
    fn weights_have_the_names_of_their_layers() {
        let layer = || product("/enc/0/query/MatMul", "onnx::MatMul_1");
        assert_eq!(
            found(vec![layer()], &[]),
            [named("onnx::MatMul_1", &["enc.0.query.weight"])]
        );
        assert_eq!(
            found(vec![layer()], &["onnx::MatMul_1"]),
            [named("onnx::MatMul_1", &["told"])]
        );
    }

    #[test]
    fn nothing_is_guessed() {
        // Two products in a scope, a weight with a name of its own, a name that is taken, no scope.
        let two = vec![
            product("/a/MatMul", "onnx::MatMul_1"),
            product("/a/MatMul_1", "onnx::MatMul_2"),
        ];
        assert!(found(two, &[]).is_empty());
        assert!(found(vec![product("/a/MatMul", "own.weight")], &[]).is_empty());
        assert!(found(vec![product("/own/MatMul", "onnx::MatMul_1")], &[]).is_empty());
        let scopeless = vec![
            product("/MatMul", "onnx::MatMul_1"),
            product("b", "onnx::MatMul_2"),
        ];
        assert!(found(scopeless, &[]).is_empty());
    }

    #[test]
    fn a_bias_names_the_weight_before_it() {
        let nodes = vec![
            product("/enc/0/attn/MatMul", "onnx::MatMul_1"),
            node("MatMul", "/enc/0/attn/MatMul_1", &["y", "y"], "scores"),
            node(
                "Add",
                "/enc/0/attn/Add",
                &["enc.0.attn.in_proj_bias", "y"],
                "z",
            ),
        ];
        assert_eq!(
            found(nodes, &[]),
            [named("onnx::MatMul_1", &["enc.0.attn.in_proj_weight"])]
        );
    }

    #[test]
    fn a_shared_initializer_has_all_its_names() {
        let nodes = vec![
            node("Identity", "Identity_1", &["own.weight"], "other.weight"),
            node("Identity", "Identity_2", &["other.weight"], "third.weight"),
            node(
                "Identity",
                "Identity_3",
                &["onnx::MatMul_1"],
                "onnx::MatMul_9",
            ),
            product("/a/MatMul", "onnx::MatMul_1"),
            product("/b/MatMul", "onnx::MatMul_9"),
        ];
        assert_eq!(
            found(nodes, &[]),
            [
                named("onnx::MatMul_1", &["a.weight", "b.weight"]),
                named(
                    "own.weight",
                    &["own.weight", "other.weight", "third.weight"]
                ),
            ]
        );
    }
}
