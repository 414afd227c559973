//! Which initializers are parameters, and which of them are trained.
//!
//! The file decides where it says so (`Graph::origins`). Otherwise a floating-point initializer of more than one element
//! is a parameter if, through ops that change only layout or precision, it reaches a weight slot (`Slot::weight`, such as
//! the table of a lookup) or meets an activation. An activation is a value that depends on a parameter or on a
//! floating-point graph input. So a rotary frequency table that only meets positions is not trained, whatever its name.
//! Class weights that only a loss reads are a setting of the loss, and are not trained. `--trainable` and `--freeze`
//! patterns override all of this; freeze wins.

use crate::error::{Error, Result};
use crate::glob;
use crate::ir::op::{Domain, Indices};
use crate::ir::{Graph, OpDef, SecondaryMap, ValueId};
use crate::ops;
use crate::ops::loss::is_class_weight;

/// One parameter of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// The initializer.
    pub value: ValueId,
    /// The framework's name where the file tells it, else the initializer's.
    pub name: String,
    /// Other names of the same (tied) weight.
    pub aliases: Vec<String>,
    /// The initializer is the transpose of the framework's parameter.
    pub transposed: bool,
    /// The framework's parameters from which the exporter computed the initializer, which is none of them.
    pub folded_from: Vec<String>,
    /// It gets a gradient.
    pub trainable: bool,
}

/// Patterns over parameter names: framework names, aliases, parameters that were folded, and names of initializers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Patterns of the only parameters that are trained, if there are any patterns.
    pub trainable: Vec<String>,
    /// Patterns of parameters that are not trained.
    pub freeze: Vec<String>,
}

/// Returns all parameters, in the order of the initializers.
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
            folded_from: origin.map_or(Vec::new(), |o| o.folded_from.clone()),
            trainable: !origin.is_some_and(|o| o.frozen),
        });
    }
    if !selection.trainable.is_empty() {
        list.iter_mut().for_each(|p| p.trainable = false);
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
    check_pattern(graph, list.iter().map(|p| p.value), pattern, option)?;
    for parameter in list.iter_mut() {
        if names(graph, parameter.value).any(|name| glob::matches(pattern, name)) {
            parameter.trainable = trainable;
        }
    }
    Ok(())
}

/// Returns the names of a parameter: those of the framework, those of parameters that were folded into it, and the
/// initializer's.
pub fn names(graph: &Graph, parameter: ValueId) -> impl Iterator<Item = &str> {
    let origin = graph.origins.get(&parameter);
    let given = origin
        .into_iter()
        .flat_map(|o| o.names.iter().chain(&o.folded_from));
    let own = &graph.value(parameter).name;
    given.chain([own]).map(String::as_str)
}

/// Returns true for the running mean or variance of a norm, by PyTorch's name of it.
pub fn is_running_statistic(name: &str) -> bool {
    name.ends_with(".running_mean") || name.ends_with(".running_var")
}

/// Returns true for a table of which a node takes rows by index.
pub fn is_looked_up(graph: &Graph, parameter: ValueId) -> bool {
    let mut uses = graph.value(parameter).uses().iter();
    uses.any(|u| u.slot == 0 && graph.node(u.node).op.indices == Indices::OfAxis)
}

/// Checks that a pattern, given as `option`, matches one of `parameters`.
///
/// # Errors
/// Names some of the parameters.
pub fn check_pattern(
    graph: &Graph,
    parameters: impl Iterator<Item = ValueId> + Clone,
    pattern: &str,
    option: &str,
) -> Result<()> {
    let is_named = |v: ValueId| names(graph, v).any(|name| glob::matches(pattern, name));
    if parameters.clone().any(is_named) {
        return Ok(());
    }
    let known = parameters.take(12).filter_map(|v| names(graph, v).next());
    let known: Vec<&str> = known.collect();
    let what = format!("{option} `{pattern}` matches no parameter");
    Err(Error::usage("pattern", what)
        .found(format!("parameters such as {}", known.join(", ")))
        .help("list them all with `ckpt-opt inspect MODEL`"))
}

fn parameters_by_flow(graph: &Graph) -> SecondaryMap<ValueId, bool> {
    let n = graph.value_bound();
    // Values that layout ops make of weights, and those of them that act as a parameter.
    let mut of_weights = SecondaryMap::new(n, false);
    let mut acts = SecondaryMap::new(n, false);
    let mut activation: SecondaryMap<ValueId, bool> = SecondaryMap::new(n, false);
    for (id, value) in graph.inits() {
        of_weights[id] =
            value.ty().dtype.is_float() && value.tensor().is_some_and(|t| t.elements() > 1);
    }
    for input in graph.inputs() {
        activation[*input] = graph.ty(*input).dtype.is_real();
    }
    let mut layout_of_weights = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        let any = |marked: &SecondaryMap<ValueId, bool>| node.operands().any(|v| marked[v]);
        let float = node.outs.iter().all(|v| graph.ty(*v).dtype.is_real());
        let meets = any(&activation);
        if keeps_meaning(node.op) && float && (node.op != &ops::concat::CONCAT || !meets) {
            for out in &node.outs {
                activation[*out] = meets;
                of_weights[*out] = any(&of_weights);
            }
            layout_of_weights.push(*id);
            continue;
        }
        let mut active = meets;
        for (slot, value) in node.ins.iter().enumerate() {
            let is_weight = |v: &ValueId| of_weights[*v] && !is_class_weight(node.op, slot);
            let Some(value) = value.filter(is_weight) else {
                continue;
            };
            let spec = node.op.slot(slot);
            if spec.is_some_and(|s| !s.stopped && (meets || s.weight)) {
                acts[value] = true;
                active = true;
            }
        }
        for out in &node.outs {
            activation[*out] = active && graph.ty(*out).dtype.is_real();
        }
    }
    for id in layout_of_weights.into_iter().rev() {
        let node = graph.node(id);
        if node.outs.iter().any(|v| acts[*v]) {
            for value in node.operands() {
                acts[value] = of_weights[value];
            }
        }
    }
    let mut is_parameter = SecondaryMap::new(n, false);
    for (id, _) in graph.inits() {
        is_parameter[id] = acts[id];
    }
    is_parameter
}

/// Returns true for ops that only change layout or precision.
fn keeps_meaning(op: &OpDef) -> bool {
    op.domain != Domain::Opaque
        && (op.is_layout() || op == &ops::concat::CONCAT || op == &ops::cast::CAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    fn names(source: &str) -> Vec<String> {
        let graph = text::parse(source).unwrap();
        let list = parameters(&graph, &Selection::default()).unwrap();
        list.into_iter().map(|p| p.name).collect()
    }

    #[test]
    fn weights_put_together_or_cast_before_use_are_parameters() {
        let source = "graph @g typed (%x: f32[n, 2], %i: i64[n]) -> (%y, %p) {
  init %q : f16[2, 2] = [1, 2, 3, 4]
  init %k : f16[2, 2] = [1, 2, 3, 4]
  init %rotary : f32[2] = [1, 2]
  init %other : f32[2] = [1, 2]
  %qk = Concat %q, %k {axis=1} : f16[2, 4]
  %wide = Cast %qk {to=f32} : f32[2, 4]
  %y = MatMul %x, %wide : f32[n, 4]
  %position = Cast %i {to=f32} : f32[n]
  %both = Concat %rotary, %other {axis=0} : f32[4]
  %start = ReduceSum %both {keepdims=0} : f32[]
  %p = Mul %position, %start : f32[n]
}
";
        assert_eq!(names(source), ["q", "k"]);
    }

    #[test]
    fn a_weight_that_is_put_beside_an_activation_is_a_parameter() {
        let source = "graph @g typed (%x: f32[n, 2]) -> (%y) {
  init %class : f32[1, 2] = [1, 2]
  %y = Concat %class, %x {axis=0} : f32[n + 1, 2]
}
";
        assert_eq!(names(source), ["class"]);
    }

    #[test]
    fn weights_of_classes_are_a_setting_of_the_loss() {
        let loss = |weights: &str| {
            format!(
                "graph @g typed (%x: f32[n, 2], %l: i64[n]) -> (%y, %z) {{
  init %w : f32[2, 3] = [1, 2, 3, 4, 5, 6]
  init %classes : f32[3] = [1, 2, 3]
  %s = MatMul %x, %w : f32[n, 3]
  %half = Cast %classes {{to=f16}} : f16[3]
  %own = Cast %half {{to=f32}} : f32[3]
  %y = SoftmaxCrossEntropyLoss %s, %l, %own : f32[]
  %z = Mul %s, {weights} : f32[n, 3]
}}
"
            )
        };
        assert_eq!(names(&loss("%s")), ["w"]);
        assert_eq!(names(&loss("%classes")), ["w", "classes"]);
    }

    #[test]
    fn a_table_is_a_parameter_whichever_op_looks_it_up() {
        for (op, indices) in [
            ("Gather %table, %i {axis=0} : f32[n, 2]", "i64[n]"),
            ("GatherND %table, %i : f32[n, 2]", "i64[n, 1]"),
            (
                "GatherElements %table, %i {axis=0} : f32[n, 2]",
                "i64[n, 2]",
            ),
        ] {
            let source = format!(
                "graph @g typed (%i: {indices}) -> (%y) {{
  init %table : f32[3, 2] = [1, 2, 3, 4, 5, 6]
  %row = {op}
  %y = Tanh %row : f32[n, 2]
}}
"
            );
            assert_eq!(names(&source), ["table"], "{op}");
        }
    }
}
