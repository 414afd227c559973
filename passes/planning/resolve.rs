//! Finds what a user's overrides mean in a graph: which ops the policy applies to, and which ops are settled beforehand.
//!
//! An override that matches nothing is an error that lists what there is, near misses first. A policy that silently did
//! not apply would look like one that saves nothing.

use super::overrides::{NamePattern, Override, PolicyOverrides, Target};
use crate::analysis::Layers;
use crate::analysis::modules::{self, Modules};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId};
use crate::near::nearest;
use crate::ops::{self, aten};
use crate::plan::annotations::{OpAnnotations, OpRole};
use crate::plan::constraint::{Constraint, Constraints, Forced, PolicyScope};
use crate::plan::index::{ByOp, ByValue, OpIdx, ValueIdx};
use crate::plan::problem::{OpPhase, Problem};
use crate::plan::saved_set::{Pinned, pinned};
use std::collections::{BTreeMap, BTreeSet};

/// Longer lists of names are cut in messages.
const MOST_NAMES: usize = 40;

/// The graph that overrides are about.
pub struct Subject<'a> {
    /// The graph that names in overrides refer to.
    pub graph: &'a Graph,
    /// The node of each op of the problem.
    pub nodes: &'a ByOp<NodeId>,
    /// The layers of the graph, as found in its dataflow.
    pub layers: &'a Layers,
    /// The planning problem of the graph.
    pub problem: &'a Problem,
    /// Layer and role of each op of the problem.
    pub annotations: &'a OpAnnotations,
}

impl<'a> Subject<'a> {
    fn node(&self, op: OpIdx) -> &'a Node {
        self.graph.node(self.nodes[op])
    }

    fn forward(&self) -> impl Iterator<Item = OpIdx> {
        let ops = self.problem.ops.indices();
        ops.filter(|op| self.problem.ops[*op].phase == OpPhase::Forward)
    }
}

/// Returns the constraints that the overrides mean for a graph.
///
/// # Errors
/// `error[selection]` for a pattern or op that matches nothing, and for a recomputation that is impossible.
pub fn resolve(overrides: &PolicyOverrides, subject: &Subject) -> Result<Constraints> {
    let annotations = subject.annotations;
    let mut constraints = Constraints::none(annotations);
    if overrides.is_empty() {
        return Ok(constraints);
    }
    if overrides.restrict() {
        constraints.scope = scopes(overrides, subject)?;
        constraints.layers = renumber(&mut constraints.scope);
        if constraints.layers == 0 && annotations.layers > 0 {
            return Err(Error::usage(
                "selection",
                "no layer lies in what --scope leaves",
            ));
        }
        if overrides.every.is_some() || overrides.first.is_some() {
            count(overrides, &mut constraints)?;
        }
        constraints.exempt_frozen(annotations);
    }
    let pins = pinned(subject.problem);
    let roots = subject.problem.roots();
    for rule in &overrides.overrides {
        force(rule, subject, &mut constraints, &pins, &roots)?;
    }
    Ok(constraints)
}

/// Returns the layer of each op after `--layers` and `--scope`.
fn scopes(overrides: &PolicyOverrides, subject: &Subject) -> Result<ByOp<PolicyScope>> {
    let (graph, annotations) = (subject.graph, subject.annotations);
    let mut scopes: ByOp<PolicyScope> = if overrides.layers.is_empty() {
        let scope = |layer: &Option<usize>| match layer {
            Some(layer) => PolicyScope::Layer(*layer),
            // Without layers a scope counts as one.
            None if annotations.layers == 0 && !overrides.scope.is_empty() => PolicyScope::Layer(0),
            None => PolicyScope::NoLayer,
        };
        annotations.layer_of.iter().map(scope).collect()
    } else {
        for pattern in &overrides.layers {
            let hits = |(path, class): (&&str, &Option<&str>)| chosen(pattern, path, *class);
            if !modules::paths(graph).iter().any(hits) {
                return Err(no_module(subject, pattern, "--layers"));
            }
        }
        let any = |path: &str, class: Option<&str>| {
            let mut patterns = overrides.layers.iter();
            patterns.any(|pattern| chosen(pattern, path, class))
        };
        let modules = Modules::new(graph, &any);
        let scope = |m: Option<u32>| match m {
            Some(module) => PolicyScope::Layer(module as usize),
            None => PolicyScope::Excluded,
        };
        subject
            .nodes
            .iter()
            .map(|n| scope(modules.of[*n]))
            .collect()
    };
    if !overrides.scope.is_empty() {
        let mut inside = subject.problem.by_op(false);
        for pattern in &overrides.scope {
            let modules = Modules::new(graph, &|path, class| chosen(pattern, path, class));
            let hits: Vec<OpIdx> = subject
                .forward()
                .filter(|op| {
                    modules.of[subject.nodes[*op]].is_some() || named(pattern, subject.node(*op))
                })
                .collect();
            if hits.is_empty() {
                return Err(no_module(subject, pattern, "--scope"));
            }
            hits.into_iter().for_each(|op| inside[op] = true);
        }
        for (scope, inside) in scopes.iter_mut().zip(inside) {
            if !inside {
                *scope = PolicyScope::Excluded;
            }
        }
    }
    Ok(scopes)
}

/// Numbers the remaining layers anew, in order of their old numbers. Returns how many there are.
fn renumber(scopes: &mut [PolicyScope]) -> usize {
    let left: BTreeSet<usize> = scopes.iter().filter_map(|s| s.layer()).collect();
    let new: BTreeMap<usize, usize> = left.into_iter().zip(0..).collect();
    for scope in scopes {
        if let PolicyScope::Layer(layer) = scope {
            *layer = new[layer];
        }
    }
    new.len()
}

/// Applies `--every` and `--first`.
fn count(overrides: &PolicyOverrides, constraints: &mut Constraints) -> Result<()> {
    if constraints.layers == 0 {
        return Err(Error::usage(
            "selection",
            "--every and --first count layers, and no repeated layers were found",
        )
        .help("name modules with --layers"));
    }
    let counted = |layer: usize| {
        overrides
            .every
            .is_none_or(|n| (layer + 1).is_multiple_of(n))
            && overrides.first.is_none_or(|n| layer < n)
    };
    for scope in &mut constraints.scope {
        // Ops in no layer are excluded too.
        if !scope.layer().is_some_and(counted) {
            *scope = PolicyScope::Excluded;
        }
    }
    Ok(())
}

fn chosen(pattern: &NamePattern, path: &str, class: Option<&str>) -> bool {
    pattern.matches_path(path) || class.is_some_and(|c| pattern.matches_class(c))
}

fn named(pattern: &NamePattern, node: &Node) -> bool {
    pattern.matches(&node.name) || pattern.matches(&node.loc.node)
}

/// Applies one override.
fn force(
    rule: &Override,
    subject: &Subject,
    constraints: &mut Constraints,
    pins: &ByValue<Option<Pinned>>,
    roots: &ByValue<ValueIdx>,
) -> Result<()> {
    let problem = subject.problem;
    let found: Vec<OpIdx> = subject
        .forward()
        .filter(|op| is_meant(rule, subject, *op))
        .collect();
    if found.is_empty() {
        return Err(never(rule, subject));
    }
    // A module or node that is named is meant wherever it lies; an op only where the policy applies.
    let by_name = matches!(rule.target, Target::Modules(_));
    let subject_to = |op: &OpIdx| !constraints.scope[*op].is_exempt();
    let there: Vec<OpIdx> = found
        .iter()
        .copied()
        .filter(|op| by_name || subject_to(op))
        .collect();
    if there.is_empty() {
        return Err(Error::usage(
            "selection",
            format!("{rule} matches only ops that the policy leaves alone"),
        )
        .found(format!(
            "{} of them, frozen or outside the layers that were asked for",
            found.len()
        ))
        .help("--recompute PATH names modules wherever they are"));
    }
    let mut settled = false;
    for op in there {
        for owner in owners(problem, roots, op) {
            let stuck = problem.ops[owner].outs.iter().all(|v| pins[*v].is_some());
            if rule.constraint == Constraint::Recompute && (owner != op || stuck) {
                continue;
            }
            settled = true;
            constraints.forced[owner] = Some(Forced {
                constraint: rule.constraint,
                by: rule.to_string(),
            });
        }
    }
    if rule.constraint == Constraint::Recompute && !settled {
        return Err(Error::usage(
            "selection",
            format!("{rule} matches only what is never recomputed"),
        )
        .found("views, graph outputs, small integer values, or ops that must not run twice"));
    }
    Ok(())
}

/// Returns the forward ops that own the storages of an op's results: the op itself, unless it makes views.
fn owners(problem: &Problem, roots: &ByValue<ValueIdx>, op: OpIdx) -> BTreeSet<OpIdx> {
    let storages = problem.ops[op].outs.iter().map(|v| roots[*v]);
    storages
        .filter_map(|root| problem.values[root].producer)
        .collect()
}

fn is_meant(rule: &Override, subject: &Subject, op: OpIdx) -> bool {
    let node = subject.node(op);
    match &rule.target {
        Target::Row(row) => node.op == *row,
        Target::Nodes(pattern) => named(pattern, node),
        Target::Modules(pattern) => {
            let mut scopes = node.loc.scopes.iter();
            scopes.any(|(path, _)| pattern.matches_path(path)) || named(pattern, node)
        }
        Target::Traced { name, overload } => {
            // An overload is told apart only where the file tells of it.
            let overload = overload.as_deref().filter(|o| *o != "default");
            match modules::traced(node) {
                Some((traced, variant)) if traced == name => {
                    return overload.is_none_or(|o| o == variant);
                }
                Some(_) if overload.is_some() => return false,
                _ => {}
            }
            let part = subject.layers.role[subject.nodes[op]];
            aten::rows(name).contains(&node.op)
                || (aten::is_attention(name)
                    && (part.is_some()
                        || subject.annotations.role_of[op] == OpRole::FusedAttention))
        }
    }
}

/// Returns the error for an override that matches nothing, with what it could have been.
fn never(rule: &Override, subject: &Subject) -> Box<Error> {
    let nodes = || subject.forward().map(|op| subject.node(op));
    let ops: BTreeSet<&str> = nodes().map(|n| n.op.name).collect();
    match &rule.target {
        Target::Row(row) => Error::usage(
            "selection",
            format!("{rule}: the model has no {}", row.name),
        )
        .found(format!("ops {}", listed(row.name, &ops))),
        Target::Traced { name, .. } => {
            let traced = nodes()
                .filter_map(|n| modules::traced(n))
                .map(|(name, _)| name);
            let is_here = |name: &&str| {
                aten::is_attention(name) && !subject.layers.attentions.is_empty()
                    || aten::rows(name).iter().any(|row| ops.contains(row.name))
            };
            let here: BTreeSet<&str> = traced
                .chain(aten::names().into_iter().filter(is_here))
                .collect();
            let known = aten::names().contains(name.as_str());
            let what = match known {
                true => format!("{rule}: the model has no op that {name} becomes"),
                false => format!("{rule}: there is no op `{name}` that we know"),
            };
            Error::usage("selection", what).found(format!("ops {}", listed(name, &here)))
        }
        Target::Nodes(pattern) => {
            let word = pattern.text();
            if word.contains(['*', '?', '/']) {
                let names: BTreeSet<&str> = nodes().map(|n| n.name.as_str()).collect();
                return Error::usage("selection", format!("{rule} matches no node"))
                    .found(format!("nodes {}", listed(word, &names)));
            }
            let rows = nearest(word, ops::all().map(|row| row.name), 3);
            let e = Error::usage(
                "selection",
                format!("{rule}: no op and no node has that name"),
            )
            .found(format!("ops {}", listed(word, &ops)));
            match rows.as_slice() {
                [] => e.help("ONNX (MatMul) and ATen (aten.mm) spellings and node names are known"),
                near => e.help(format!("did you mean {}?", near.join(" or "))),
            }
        }
        Target::Modules(pattern) => no_module(subject, pattern, rule.option()),
    }
}

/// Returns the error for a pattern that matches no module, with the classes, modules or nodes that exist.
fn no_module(subject: &Subject, pattern: &NamePattern, option: &str) -> Box<Error> {
    let graph = subject.graph;
    let what = match option {
        "--layers" => "no module class or path",
        "--scope" => "no module and no node",
        _ => "no module path and no node",
    };
    let text = pattern.text();
    let mut e = Error::usage("selection", format!("{option} {text} matches {what}"));
    let classes = modules::classes(graph);
    let paths: BTreeSet<&str> = modules::paths(graph)
        .into_keys()
        .filter(|p| !p.is_empty())
        .collect();
    if !classes.is_empty() && option != "--recompute" {
        let near = nearest(text, classes.keys().copied(), MOST_NAMES);
        let rest = classes.keys().copied().filter(|c| !near.contains(c));
        let all: Vec<String> = near
            .iter()
            .copied()
            .chain(rest)
            .map(|class| format!("{class} ({})", classes[class]))
            .collect();
        e = e.found(format!("classes {}", cut(&all)));
    }
    if !paths.is_empty() {
        return e.found(format!("modules {}", listed(text, &paths)));
    }
    let names = subject.nodes.iter().map(|n| graph.node(*n).name.as_str());
    let names: BTreeSet<&str> = names.collect();
    e = e.found(format!(
        "no module names in this file; nodes {}",
        listed(text, &names)
    ));
    match subject.annotations.layers {
        0 => e,
        n => e.help(format!(
            "{n} layers were found by their structure: --every and --first count them"
        )),
    }
}

/// Returns names for a message: near misses first, then in alphabetical order.
fn listed(word: &str, names: &BTreeSet<&str>) -> String {
    let near = nearest(word, names.iter().copied(), 3);
    let rest = names.iter().copied().filter(|n| !near.contains(n));
    let all: Vec<String> = near
        .iter()
        .copied()
        .chain(rest)
        .map(str::to_string)
        .collect();
    cut(&all)
}

fn cut(names: &[String]) -> String {
    match names.len().checked_sub(MOST_NAMES) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..MOST_NAMES].join(", ")),
    }
}
