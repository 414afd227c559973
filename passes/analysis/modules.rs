//! The modules of a model by the paths and classes in the scopes of its nodes.
//!
//! Exporters leave module paths on most nodes, not on all. A node without a path belongs to the module that all its
//! readers belong to: constants and casts that an exporter inserted belong to the nodes that read them.

use crate::ir::{Graph, Node, NodeId, Role, SecondaryMap};
use std::collections::BTreeMap;

/// Metadata key in which an exporter notes the op that a node was traced from:
/// `%linear : … = call_function[target=torch.ops.aten.linear.default](…)`.
const TRACED: &str = "pkg.torch.onnx.fx_node";

/// Metadata key of our own note of the same: `aten.linear.default`.
pub const OUR_TRACED: &str = "ckpt.traced";

/// Returns the ATen op that a node was traced from, where its file says so: name (`aten.linear`) and overload (`default`).
pub fn traced(node: &Node) -> Option<(&str, &str)> {
    let target = match node.meta.get(OUR_TRACED) {
        Some(ours) => ours.as_str(),
        None => {
            let (_, rest) = node.meta.get(TRACED)?.split_once("target=")?;
            rest.split(']').next()?.strip_prefix("torch.ops.")?
        }
    };
    let mut parts = target.splitn(3, '.');
    let length = parts.next()?.len() + 1 + parts.next()?.len();
    Some((&target[..length], parts.next().unwrap_or("")))
}

/// Some modules of a graph, and the nodes in each.
pub struct Modules {
    /// Path and class of each, in the order of their first nodes.
    pub list: Vec<(String, Option<String>)>,
    /// The module that each forward node is in.
    pub of: SecondaryMap<NodeId, Option<u32>>,
}

impl Modules {
    /// Finds the outermost modules whose path and class `chosen` accepts. Linear.
    pub fn new(graph: &Graph, chosen: &dyn Fn(&str, Option<&str>) -> bool) -> Modules {
        let mut answers: BTreeMap<(&str, Option<&str>), bool> = BTreeMap::new();
        let mut index: BTreeMap<&str, u32> = BTreeMap::new();
        let mut modules = Modules {
            list: Vec::new(),
            of: SecondaryMap::new(graph.node_bound(), None),
        };
        for id in forward(graph) {
            let module = graph.node(id).loc.scopes.iter().find(|(path, class)| {
                let key = (path.as_str(), class.as_deref());
                *answers.entry(key).or_insert_with(|| chosen(key.0, key.1))
            });
            if let Some((path, class)) = module {
                let new = modules.list.len() as u32;
                let at = *index.entry(path).or_insert(new);
                if at == new {
                    modules.list.push((path.clone(), class.clone()));
                }
                modules.of[id] = Some(at);
            }
        }
        modules.adopt(graph);
        modules
    }

    /// Assigns nodes without a scope to the module of all their readers.
    fn adopt(&mut self, graph: &Graph) {
        let order: Vec<NodeId> = forward(graph).collect();
        for id in order.into_iter().rev() {
            let node = graph.node(id);
            if !node.loc.scopes.is_empty() {
                continue;
            }
            let readers = node.outs.iter().flat_map(|v| graph.value(*v).uses());
            let mut readers = readers
                .map(|u| u.node)
                .filter(|n| is_forward(graph.node(*n)))
                .map(|n| self.of[n]);
            if let Some(Some(module)) = readers.next()
                && readers.all(|m| m == Some(module))
            {
                self.of[id] = Some(module);
            }
        }
    }
}

fn is_forward(node: &Node) -> bool {
    node.role != Role::Backward && node.recompute_of.is_none()
}

fn forward(graph: &Graph) -> impl Iterator<Item = NodeId> + '_ {
    let order = graph.order().iter().copied();
    order.filter(|id| is_forward(graph.node(*id)))
}

/// Returns every class that the file names, with the number of its modules.
pub fn classes(graph: &Graph) -> BTreeMap<&str, usize> {
    let mut count = BTreeMap::new();
    for class in paths(graph).into_values().flatten() {
        *count.entry(class).or_insert(0) += 1;
    }
    count
}

/// Returns every module path that the file names, with its class.
pub fn paths(graph: &Graph) -> BTreeMap<&str, Option<&str>> {
    let scopes = forward(graph).flat_map(|id| &graph.node(id).loc.scopes);
    let scopes = scopes.map(|(path, class)| (path.as_str(), class.as_deref()));
    let mut paths = BTreeMap::new();
    for (path, class) in scopes {
        let known = paths.entry(path).or_insert(class);
        *known = known.or(class);
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn nodes_without_a_scope_are_their_readers() {
        let source = "graph @g typed (%x: f32[n]) -> (%y, %z) {
scope \"\" is \"Net\", \"a\" is \"Block\":
  %p = Tanh %x : f32[n]
scope \"\" is \"Net\", \"a\" is \"Block\", \"a.inner\" is \"Act\":
  %q = Tanh %p : f32[n]
scope:
  %c = Neg %x : f32[n]
  %shared = Neg %x : f32[n]
scope \"\" is \"Net\", \"b\" is \"Block\":
  %y = Mul %c, %shared : f32[n]
  %z = Mul %q, %shared : f32[n]
}
";
        let g = text::parse(source).unwrap();
        let in_block = |_: &str, class: Option<&str>| class == Some("Block");
        let found = Modules::new(&g, &in_block);
        let paths: Vec<&str> = found.list.iter().map(|(p, _)| p.as_str()).collect();
        assert_eq!(paths, ["a", "b"]);
        let of = |name: &str| found.of[g.find_node(name).unwrap()];
        let expected = [
            ("p", Some(0)),
            ("q", Some(0)),
            ("c", Some(1)),
            ("shared", Some(1)),
        ];
        for (name, module) in expected {
            assert_eq!(of(name), module, "{name}");
        }
        assert_eq!(classes(&g)["Block"], 2);
        assert_eq!(super::paths(&g).len(), 4);
    }
}
