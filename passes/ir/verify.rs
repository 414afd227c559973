//! The invariants of a graph, checked after every pass.
//!
//! - **I1** Every value has one definition, and that definition names it.
//! - **I2** A definition precedes its uses in `order`; `order` lists every node once.
//! - **I3** Use lists are exact.
//! - **I4** Operand count, result count and attributes fit the op's row.
//! - **I5** From phase `Typed` on, every value has a type, and it is the one the op's rule infers again.
//! - **I6** A node with `recompute_of` has the op and attributes of its original, which comes before it, and its operands have
//!   the same origins.
//! - **I7** Only `Pure` and `Seeded` nodes are copied.
//! - **I8** Names are unique: among nodes, among values.
//!
//! All broken invariants are reported at once (up to [`MAX_REPORTED`]), each with its number.

use super::graph::{Def, Graph, Phase, Use};
use super::id::{NodeId, SecondaryMap, ValueId};
use super::typing::{Contents, check_arity, type_node};
use crate::error::{Error, Result};
use rustc_hash::FxHashSet;

/// A report longer than this helps nobody.
pub const MAX_REPORTED: usize = 8;

/// Checks I1–I8.
///
/// # Errors
/// A `bug[verify]` that lists what is broken.
pub fn verify(graph: &Graph) -> Result<()> {
    let mut broken = Vec::new();
    names(graph, &mut broken);
    order(graph, &mut broken);
    uses(graph, &mut broken);
    if broken.is_empty() {
        schema(graph, &mut broken);
    }
    if broken.is_empty() && graph.phase >= Phase::Typed {
        types(graph, &mut broken);
    }
    if broken.is_empty() {
        copies(graph, &mut broken);
    }
    if broken.is_empty() {
        return Ok(());
    }
    let more = broken.len().saturating_sub(MAX_REPORTED);
    broken.truncate(MAX_REPORTED);
    if more > 0 {
        broken.push(format!("… and {more} more"));
    }
    Err(Error::bug(
        "verify",
        format!(
            "graph `{}` breaks its invariants\n{}",
            graph.name,
            broken.join("\n")
        ),
    ))
}

fn names(graph: &Graph, broken: &mut Vec<String>) {
    let mut seen = FxHashSet::default();
    for (_, node) in graph.nodes.iter() {
        if !seen.insert(node.name.as_str()) || !graph.node_names.contains(&node.name) {
            broken.push(format!("I8 two nodes are named `{}`", node.name));
        }
    }
    seen.clear();
    for (_, value) in graph.values.iter() {
        if !seen.insert(value.name.as_str()) || !graph.value_names.contains(&value.name) {
            broken.push(format!("I8 two values are named `{}`", value.name));
        }
    }
}

fn order(graph: &Graph, broken: &mut Vec<String>) {
    let mut listed: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
    let mut defined: SecondaryMap<ValueId, bool> = SecondaryMap::new(graph.value_bound(), false);
    for (id, value) in graph.values.iter() {
        match value.def {
            Def::Input | Def::Init(_) => defined[id] = true,
            Def::Node { node, slot } => {
                if graph
                    .nodes
                    .get(node)
                    .is_none_or(|n| n.outs.get(slot) != Some(&id))
                {
                    broken.push(format!(
                        "I1 `{}` is not a result of the node that it names",
                        value.name
                    ));
                }
            }
        }
    }
    for input in &graph.inputs {
        if graph.values.get(*input).is_none_or(|v| v.def != Def::Input) {
            broken.push(format!("I1 graph input {input:?} is not an input"));
        }
    }
    for id in &graph.order {
        let Some(node) = graph.nodes.get(*id) else {
            broken.push(format!("I2 `order` lists {id:?}, which was removed"));
            continue;
        };
        if std::mem::replace(&mut listed[*id], true) {
            broken.push(format!("I2 `order` lists `{}` twice", node.name));
        }
        if node.recompute_of.is_some_and(|original| !listed[original]) {
            broken.push(format!(
                "I6 `{}` comes before the node it recomputes",
                node.name
            ));
        }
        for value in node.ins.iter().flatten() {
            if !defined[*value] {
                let name = graph
                    .values
                    .get(*value)
                    .map_or("(removed)", |v| v.name.as_str());
                broken.push(format!(
                    "I2 `{}` reads `{name}` before its definition",
                    node.name
                ));
            }
        }
        for (slot, out) in node.outs.iter().enumerate() {
            if graph
                .values
                .get(*out)
                .is_none_or(|v| v.def != Def::Node { node: *id, slot })
            {
                broken.push(format!(
                    "I1 result {slot} of `{}` does not name it as its definition",
                    node.name
                ));
            }
            if std::mem::replace(&mut defined[*out], true) {
                broken.push(format!(
                    "I1 result {slot} of `{}` is defined twice",
                    node.name
                ));
            }
        }
    }
    for (id, node) in graph.nodes.iter() {
        if !listed[id] {
            broken.push(format!("I2 `{}` is not in `order`", node.name));
        }
    }
    for output in &graph.outputs {
        if graph.values.get(*output).is_none() || !defined[*output] {
            broken.push(format!("I2 graph output {output:?} is never defined"));
        }
    }
}

fn uses(graph: &Graph, broken: &mut Vec<String>) {
    let mut counted: SecondaryMap<ValueId, Vec<Use>> =
        SecondaryMap::new(graph.value_bound(), Vec::new());
    for (id, node) in graph.nodes.iter() {
        for (slot, value) in node.ins.iter().enumerate() {
            if let Some(value) = value {
                counted[*value].push(Use { node: id, slot });
            }
        }
    }
    for (id, value) in graph.values.iter() {
        let mut recorded = value.uses.clone();
        recorded.sort_unstable();
        if recorded != counted[id] {
            broken.push(format!("I3 the use list of `{}` is wrong", value.name));
        }
    }
}

fn schema(graph: &Graph, broken: &mut Vec<String>) {
    for (id, node) in graph.nodes.iter() {
        if let Err(e) = check_arity(graph, id) {
            broken.push(format!("I4 `{}`: {}", node.name, e.message()));
        }
        if let Err(e) = check_attrs(graph, id) {
            broken.push(format!("I4 `{}`: {}", node.name, e.message()));
        }
    }
}

/// Invariant I4 for attributes: all are known, of the right kind, and complete.
pub fn check_attrs(graph: &Graph, id: NodeId) -> Result<()> {
    let node = graph.node(id);
    if node.op.domain == super::op::Domain::Opaque {
        return Ok(());
    }
    for (name, value) in node.attrs.iter() {
        let Some(spec) = node.op.attrs.iter().find(|s| s.name == name) else {
            return Err(Error::model(
                "attribute",
                format!("{} has no attribute `{name}`", node.op.name),
            ));
        };
        if spec.kind != value.kind() {
            return Err(Error::model(
                "attribute",
                format!(
                    "attribute `{name}` of {} is of the wrong kind",
                    node.op.name
                ),
            )
            .expected(spec.kind.to_string())
            .found(value.kind().to_string()));
        }
    }
    for spec in node.op.attrs {
        if !matches!(spec.default, super::attr::AttrDefault::Absent)
            && node.attrs.get(spec.name).is_none()
        {
            return Err(Error::model(
                "attribute",
                format!("{} needs attribute `{}`", node.op.name, spec.name),
            ));
        }
    }
    Ok(())
}

fn types(graph: &Graph, broken: &mut Vec<String>) {
    let mut contents = Contents::of(graph);
    for (_, value) in graph.values.iter() {
        if value.ty.is_none() {
            broken.push(format!("I5 `{}` has no type", value.name));
        }
    }
    if !broken.is_empty() {
        return;
    }
    for id in &graph.order {
        let node = graph.node(*id);
        if node.op.domain == super::op::Domain::Opaque {
            continue;
        }
        match type_node(graph, *id, &contents) {
            Err(e) => broken.push(format!("I5 `{}`: {}", node.name, e.message())),
            Ok(typed) => {
                for (value, (ty, ints)) in node.outs.iter().zip(typed) {
                    // A copy's data-dependent sizes carry the original's names.
                    if node.recompute_of.is_none() && ty != *graph.ty(*value) {
                        broken.push(format!(
                            "I5 `{}` has type {} but {ty} is inferred",
                            graph.value(*value).name,
                            graph.ty(*value)
                        ));
                    }
                    contents.set(*value, ints);
                }
            }
        }
    }
}

fn copies(graph: &Graph, broken: &mut Vec<String>) {
    for (id, node) in graph.nodes.iter() {
        if node.recompute_of.is_some()
            && let Err(e) = check_copy(graph, id)
        {
            broken.push(format!("{} (`{}`)", e.message(), node.name));
        }
    }
}

/// Invariants I6 and I7 for one node that claims to be a copy.
pub fn check_copy(graph: &Graph, id: NodeId) -> Result<()> {
    let node = graph.node(id);
    let Some(original) = node.recompute_of else {
        return Ok(());
    };
    let Some(source) = graph.nodes.get(original) else {
        return Err(Error::bug("verify", "I6 the original was removed"));
    };
    if !source.op.effect.recomputable() {
        return Err(Error::bug(
            "verify",
            format!("I7 {} must not be copied", source.op.name),
        ));
    }
    let same_operands = node.ins.len() == source.ins.len()
        && node
            .ins
            .iter()
            .zip(&source.ins)
            .all(|(a, b)| a.map(|v| graph.origin(v)) == b.map(|v| graph.origin(v)));
    if node.op != source.op
        || node.attrs != source.attrs
        || !same_operands
        || node.outs.len() != source.outs.len()
    {
        return Err(Error::bug(
            "verify",
            format!("I6 it does not recompute `{}`", source.name),
        ));
    }
    Ok(())
}
