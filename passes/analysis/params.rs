//! Which initializers are parameters, and which of them are trained.
//!
//! Where the file says so (`Graph::origins`), the file is right. Otherwise a floating-point initializer of more than
//! one element is a parameter if, through layout ops only, it reaches an operand that is one by its meaning (the table
//! of a lookup, the scale of a norm: `Slot::weight`) or meets an activation: a value that depends on a parameter or on
//! a floating-point graph input. So a rotary frequency table that only meets positions is not trained, whatever its
//! name. `--trainable` and `--freeze` patterns decide over that; freeze wins.

use crate::error::{Error, Result};
use crate::glob;
use crate::ir::op::Domain;
use crate::ir::{Graph, Side, ValueId};

/// One parameter of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    pub value: ValueId,
    /// The framework's name where the file tells it, else the initializer's.
    pub name: String,
    /// Other names of the same (tied) weight.
    pub aliases: Vec<String>,
    /// The initializer is the transpose of the framework's parameter.
    pub transposed: bool,
    pub trainable: bool,
}

/// Patterns over parameter names: a framework name, an alias, or an initializer's name.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// If any, only these are trained.
    pub trainable: Vec<String>,
    /// These are not trained, whatever else says so.
    pub freeze: Vec<String>,
}

/// All parameters, in the order of the initializers.
///
/// # Errors
/// A pattern that matches no parameter.
pub fn parameters(graph: &Graph, selection: &Selection) -> Result<Vec<Parameter>> {
    let by_flow = parameters_by_flow(graph);
    let mut list = Vec::new();
    for (id, value) in graph.inits() {
        if !value.ty().dtype.is_float() {
            continue;
        }
        let origin = graph.origins.get(&id);
        if !origin.and_then(|o| o.is_parameter).unwrap_or(by_flow[id]) {
            continue;
        }
        let mut names = origin.map_or(Vec::new(), |o| o.names.clone());
        if names.is_empty() {
            names.push(value.name.clone());
        }
        let name = names.remove(0);
        let transposed = origin.is_some_and(|o| o.transposed);
        list.push(Parameter {
            value: id,
            name,
            aliases: names,
            transposed,
            trainable: true,
        });
    }
    if !selection.trainable.is_empty() {
        for parameter in &mut list {
            parameter.trainable = false;
        }
        for pattern in &selection.trainable {
            mark(graph, &mut list, pattern, true, "--trainable")?;
        }
    }
    for pattern in &selection.freeze {
        mark(graph, &mut list, pattern, false, "--freeze")?;
    }
    Ok(list)
}

fn mark(
    graph: &Graph,
    list: &mut [Parameter],
    pattern: &str,
    trainable: bool,
    option: &str,
) -> Result<()> {
    let mut hit = false;
    for parameter in list.iter_mut() {
        let initializer = graph.value(parameter.value).name.as_str();
        let mut names = parameter
            .aliases
            .iter()
            .map(String::as_str)
            .chain([parameter.name.as_str(), initializer]);
        if names.any(|name| glob::matches(pattern, name)) {
            parameter.trainable = trainable;
            hit = true;
        }
    }
    if hit {
        return Ok(());
    }
    let known: Vec<&str> = list.iter().map(|p| p.name.as_str()).take(12).collect();
    Err(Error::usage(
        "pattern",
        format!("{option} `{pattern}` matches no parameter"),
    )
    .found(format!("parameters such as {}", known.join(", ")))
    .help("list them all with `ckpt-opt inspect MODEL`"))
}

fn parameters_by_flow(graph: &Graph) -> Side<ValueId, bool> {
    let n = graph.value_bound();
    let mut is_parameter = Side::new(n, false);
    // The initializer a value is a view of, through layout ops.
    let mut root: Side<ValueId, Option<ValueId>> = Side::new(n, None);
    let mut activation: Side<ValueId, bool> = Side::new(n, false);
    for (id, value) in graph.inits() {
        if value.ty().dtype.is_float() && value.tensor().is_some_and(|t| t.elements() > 1) {
            root[id] = Some(id);
        }
    }
    for input in graph.inputs() {
        activation[*input] = graph.ty(*input).dtype.is_float();
    }
    for id in graph.order() {
        let node = graph.node(*id);
        let first = node.ins.first().copied().flatten();
        if node.op.is_layout()
            && node.op.domain != Domain::Opaque
            && let Some(x) = first
        {
            for out in &node.outs {
                root[*out] = root[x];
                activation[*out] = activation[x];
            }
            continue;
        }
        let meets = node.ins.iter().flatten().any(|v| activation[*v]);
        let mut active = meets;
        for (slot, value) in node.ins.iter().enumerate() {
            let Some(value) = value else { continue };
            let Some(init) = root[*value] else { continue };
            let spec = node.op.ins.get(slot).or(node.op.ins.last());
            if meets || spec.is_some_and(|s| s.weight) {
                is_parameter[init] = true;
                active = true;
            }
        }
        for out in &node.outs {
            activation[*out] = active && graph.ty(*out).dtype.is_float();
        }
    }
    is_parameter
}
