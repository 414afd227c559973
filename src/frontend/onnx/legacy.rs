//! Names of parameters in files of the legacy exporter, which writes no metadata about them.
//!
//! It folds the transpose of a linear layer's weight into an initializer `onnx::MatMul_424`, and reshapes the weights of group
//! norms. Weights with equal values are stored once, with an `Identity` for each further name. The names of biases and the module paths in names of nodes still
//! tell the names of weights. A weight gets a name only if there is exactly one candidate.

use crate::onnx::proto::{GraphProto, NodeProto};
use ckpt_passes::ir::{Graph, Origin, Ty, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the names that the exporter gives to folded initializers. The op that reads one follows.
pub const FOLDED: &str = "onnx::";

/// Adds names to `graph.origins`: further names of shared initializers, and names of folded weights. The latter come from the
/// bias that is added to the product, or else from a scope with a single product, or from a scope with a norm.
pub fn names(graph: &mut Graph, file: &GraphProto) {
    let ids: BTreeMap<String, ValueId> =
        graph.inits().map(|(id, v)| (v.name.clone(), id)).collect();
    let shared = identities(&ids, file);
    statistics(graph, file, &ids);
    let told: BTreeSet<ValueId> = graph.origins.keys().copied().collect();
    for (name, id) in &shared {
        let is_float = graph.value(*id).ty().dtype.is_float();
        if is_float && !told.contains(id) && is_parameter_name(name) {
            add(graph, *id, name, false);
        }
    }
    let mut products_of: BTreeMap<&str, usize> = BTreeMap::new();
    let products = file.node.iter().filter(|n| n.op_type() == "MatMul");
    for scope in products.filter_map(scope_of) {
        *products_of.entry(scope).or_insert(0) += 1;
    }
    let norms = file
        .node
        .iter()
        .filter(|n| n.op_type() == "InstanceNormalization");
    let norms: BTreeSet<&str> = norms.filter_map(scope_of).collect();
    let biases = biases(file, &ids);
    for node in &file.node {
        for operand in &node.input {
            let Some(id) = ids.get(operand).or_else(|| shared.get(operand)).copied() else {
                continue;
            };
            let value = graph.value(id);
            if !value.name.starts_with(FOLDED) || told.contains(&id) {
                continue;
            }
            let scope = scope_of(node);
            let of_scope =
                |kind: &str| scope.map(|scope| format!("{}.{kind}", scope.replace('/', ".")));
            let in_norm = scope.is_some_and(|s| norms.contains(s)) && is_column(value.ty());
            let matrix = value.ty().rank() == 2;
            let name = match node.op_type() {
                "MatMul" if matrix => {
                    let by_bias = biases.get(node.output.first().map_or("", String::as_str));
                    let by_bias = by_bias.map(|stem| format!("{stem}weight"));
                    let alone = scope.is_some_and(|s| products_of[s] == 1);
                    by_bias.or_else(|| of_scope("weight").filter(|_| alone))
                }
                "PRelu" => of_scope("weight"),
                "Mul" if in_norm => of_scope("weight"),
                "Add" if in_norm => of_scope("bias"),
                _ => None,
            };
            let known = graph.origins.get(&id).map_or(&[][..], |o| &o.names);
            let is_new = |name: &String| {
                !ids.contains_key(name)
                    && !shared.contains_key(name)
                    && !known.iter().any(|first| is_later_call(name, first))
            };
            if let Some(name) = name.filter(is_new) {
                add(graph, id, &name, node.op_type() == "MatMul");
            }
        }
    }
}

/// Marks the running statistics of batch norms as no parameters.
fn statistics(graph: &mut Graph, file: &GraphProto, ids: &BTreeMap<String, ValueId>) {
    let norms = file
        .node
        .iter()
        .filter(|n| n.op_type() == "BatchNormalization");
    for name in norms.flat_map(|norm| norm.input.iter().skip(3)) {
        if let Some(id) = ids.get(name) {
            let origin = graph.origins.entry(*id).or_insert_with(|| Origin {
                is_persistent: is_parameter_name(name),
                ..Origin::constant(name)
            });
            origin.is_parameter = Some(false);
        }
    }
}

/// Returns true if a name comes from a later call of the module that `first` names: `shared_1.weight` for `shared.weight`.
fn is_later_call(name: &str, first: &str) -> bool {
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let same = |(later, first): (&str, &str)| {
        let rest = later
            .strip_prefix(first)
            .and_then(|rest| rest.strip_prefix('_'));
        later == first || rest.is_some_and(is_number)
    };
    name != first
        && name.split('.').count() == first.split('.').count()
        && name.split('.').zip(first.split('.')).all(same)
}

/// Returns true for a name that a module gave to a parameter.
pub fn is_parameter_name(name: &str) -> bool {
    name.contains('.') && !name.contains(['/', ':'])
}

/// Returns true if all sizes but one are 1.
fn is_column(ty: &Ty) -> bool {
    let sizes = ty.static_dims().unwrap_or_default();
    sizes.iter().filter(|n| **n != 1).count() <= 1
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
        ..Origin::default()
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
        let source = ids.get(from).or_else(|| shared.get(from)).copied();
        // A merged constant is an initializer of its own again.
        if let Some(id) = source.filter(|_| !ids.contains_key(to)) {
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
                    ..Origin::default()
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

    #[test]
    fn a_module_that_is_called_twice_has_one_name() {
        let nodes = vec![
            product("/h.0/fc/MatMul", "onnx::MatMul_1"),
            product("/h.0_1/fc/MatMul", "onnx::MatMul_1"),
            product("/h.0/fc_2/MatMul", "onnx::MatMul_1"),
            product("/h.1/fc/MatMul", "onnx::MatMul_1"),
        ];
        let names = ["h.0.fc.weight", "h.1.fc.weight"];
        assert_eq!(found(nodes, &[]), [named("onnx::MatMul_1", &names)]);
    }
}
