//! Finds what a user's overrides mean in a graph: which ops the policy applies to, and which ops are settled beforehand.
//!
//! An override that matches nothing is an error that lists what there is, near misses first. A policy that silently did
//! not apply would look like one that saves nothing.

use super::overrides::{NamePattern, Override, PolicyOverrides, Target};
use crate::analysis::Layers;
use crate::analysis::modules::{self, Modules};
use crate::error::{Error, Result};
use crate::ir::{FusedNode, Graph, Node, NodeId};
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
    let mut constraints = Constraints::of(subject.problem, annotations);
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
    let layers = constraints.layers;
    if !(0..layers).any(counted) {
        let options = PolicyOverrides {
            every: overrides.every,
            first: overrides.first,
            ..PolicyOverrides::default()
        };
        return Err(
            Error::usage("selection", format!("{options} leaves no layer"))
                .expected(format!("a number of at most {layers}"))
                .found(format!("{layers} layers")),
        );
    }
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
    let found = meant(&rule.target, subject);
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
            let is_stuck = |v: &ValueIdx| pins[*v].is_some_and(|pin| pin != Pinned::Output);
            let stuck = problem.ops[owner].outs.iter().all(is_stuck);
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
        .found("views, small integer values, or ops that must not run twice"));
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

/// Returns the forward ops that a target means. A name that no node has may be PyTorch's for an op (`addmm`).
fn meant(target: &Target, subject: &Subject) -> Vec<OpIdx> {
    let of = |target: &Target| -> Vec<OpIdx> {
        let ops = subject.forward();
        ops.filter(|op| is_meant(target, subject, *op)).collect()
    };
    let found = of(target);
    match target.alias().filter(|_| found.is_empty()) {
        Some(alias) => of(&alias),
        None => found,
    }
}

fn is_meant(target: &Target, subject: &Subject, op: OpIdx) -> bool {
    let node = subject.node(op);
    match target {
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

/// Returns whether a target means a node that was fused with others.
fn is_fused(target: &Target, part: &FusedNode) -> bool {
    match target {
        Target::Row(row) => part.op == *row,
        Target::Traced { name, .. } => aten::rows(name).contains(&part.op),
        Target::Nodes(pattern) => pattern.matches(&part.name) || pattern.matches(&part.loc.node),
        Target::Modules(pattern) => {
            let mut scopes = part.loc.scopes.iter();
            scopes.any(|(path, _)| pattern.matches_path(path))
                || is_fused(&Target::Nodes(pattern.clone()), part)
        }
    }
}

/// Returns the nodes that a target means among those that were fused, each with the op that it is part of.
fn fused<'a>(target: &Target, subject: &'a Subject) -> Vec<(OpIdx, &'a FusedNode)> {
    let mut found = Vec::new();
    for op in subject.forward() {
        let parts = subject.node(op).fused_from.iter();
        let meant = parts.filter(|part| is_fused(target, part));
        found.extend(meant.map(|part| (op, part)));
    }
    found
}

/// Returns the names of fused ops, each once.
fn names_of(parts: &[(OpIdx, &FusedNode)], subject: &Subject) -> Vec<&'static str> {
    let names = parts.iter().map(|(op, _)| subject.node(*op).op.name);
    let names: BTreeSet<&str> = names.collect();
    names.into_iter().collect()
}

/// Returns a warning for each override that means nodes which are part of fused ops now, where no override settles these.
/// PyTorch's names mean more rows than were written for the op, so they are left out.
pub fn missed(
    overrides: &PolicyOverrides,
    subject: &Subject,
    constraints: &Constraints,
) -> Vec<String> {
    let rules = overrides.overrides.iter();
    let of_ops = rules.filter(|rule| matches!(rule.target, Target::Row(_) | Target::Nodes(_)));
    let warning = |rule: &Override| {
        let mut parts = fused(&rule.target, subject);
        parts.retain(|(op, _)| constraints.forced[*op].is_none());
        let names = names_of(&parts, subject);
        (!parts.is_empty()).then(|| {
            format!(
                "{rule} does not reach {} nodes that were fused into {}: {} {} means the fused ops, and --fuse off leaves the \
                 nodes as the model has them",
                parts.len(),
                names.join(", "),
                rule.option(),
                names.join(",")
            )
        })
    };
    of_ops.filter_map(warning).collect()
}

/// Returns the error for a target that means only nodes that are part of fused ops now, if it does.
fn only_fused(option: &str, target: &Target, subject: &Subject) -> Option<Box<Error>> {
    let mut parts = fused(target, subject);
    if let Some(alias) = target.alias().filter(|_| parts.is_empty()) {
        parts = fused(&alias, subject);
    }
    if parts.is_empty() {
        return None;
    }
    let names = names_of(&parts, subject);
    let what = format!(
        "{option} {target} matches only nodes that were fused into {}",
        names.join(", ")
    );
    let means = match target {
        Target::Modules(_) => String::new(),
        _ => format!("{option} {} means the fused ops; ", names.join(",")),
    };
    let found: Vec<String> = parts
        .iter()
        .map(|(op, part)| {
            let node = subject.node(*op);
            format!("`{}` in `{}` ({})", part.name, node.name, node.op.name)
        })
        .collect();
    Some(
        Error::usage("selection", what)
            .found(cut(&found))
            .help(format!(
                "{means}--fuse off leaves the nodes as the model has them"
            )),
    )
}

/// Returns the error for an override that matches nothing, with what it could have been.
fn never(rule: &Override, subject: &Subject) -> Box<Error> {
    if let Some(error) = only_fused(rule.option(), &rule.target, subject) {
        return error;
    }
    let nodes = || subject.forward().map(|op| subject.node(op));
    let ops: BTreeSet<&str> = nodes().map(|n| n.op.name).collect();
    let is_here = |name: &&str| {
        aten::is_attention(name) && !subject.layers.attentions.is_empty()
            || aten::rows(name).iter().any(|row| ops.contains(row.name))
    };
    let traced = nodes()
        .filter_map(|n| modules::traced(n))
        .map(|(name, _)| name);
    let names_here: BTreeSet<&str> = traced
        .chain(aten::names().into_iter().filter(is_here))
        .collect();
    match &rule.target {
        Target::Row(row) => Error::usage(
            "selection",
            format!("{rule}: the model has no {}", row.name),
        )
        .found(format!("ops {}", listed(row.name, &ops))),
        Target::Traced { name, .. } => {
            let known = aten::names().contains(name.as_str());
            let what = match known {
                true => format!("{rule}: the model has no op that {name} becomes"),
                false => format!("{rule}: there is no op `{name}` that we know"),
            };
            Error::usage("selection", what).found(format!("ops {}", listed(name, &names_here)))
        }
        Target::Nodes(pattern) => {
            let word = pattern.text();
            let in_backward = subject.problem.ops.indices().filter(|op| {
                subject.problem.ops[*op].phase == OpPhase::Backward
                    && named(pattern, subject.node(*op))
            });
            if in_backward.count() > 0 {
                let what = format!("{rule} matches only nodes of the backward pass");
                return Error::usage("selection", what)
                    .expected("ops whose results the backward pass reads");
            }
            if word.contains(['*', '?', '/']) {
                let names: BTreeSet<&str> = nodes().map(|n| n.name.as_str()).collect();
                return Error::usage("selection", format!("{rule} matches no node"))
                    .found(format!("nodes {}", listed(word, &names)));
            }
            let e = Error::usage(
                "selection",
                format!("{rule}: no op and no node has that name"),
            )
            .found(format!("ops {}", listed(word, &ops)));
            match near_ops(word, &ops, &names_here).as_slice() {
                [] => e.help("ONNX (MatMul) and ATen (aten.mm) spellings and node names are known"),
                near => e.help(format!("did you mean {}?", near.join(" or "))),
            }
        }
        Target::Modules(pattern) => no_module(subject, pattern, rule.option()),
    }
}

/// Returns the ops that a misspelled word may mean, with the rows that PyTorch's names stand for: those of the model, else
/// those of the op table.
fn near_ops(word: &str, ops: &BTreeSet<&str>, names_here: &BTreeSet<&str>) -> Vec<String> {
    let here = near_spellings(word, ops, names_here);
    match here.is_empty() {
        false => here,
        true => near_spellings(
            word,
            &ops::all().map(|row| row.name).collect(),
            &aten::names(),
        ),
    }
}

fn near_spellings(word: &str, ops: &BTreeSet<&str>, names: &BTreeSet<&str>) -> Vec<String> {
    let aliases = names.iter().filter_map(|name| name.strip_prefix("aten."));
    let mut found = Vec::new();
    let mut meant: BTreeSet<&str> = BTreeSet::new();
    for near in nearest(word, ops.iter().copied().chain(aliases), 3) {
        let name = format!("aten.{near}");
        let rows: Vec<&str> = match ops.contains(near) {
            true => vec![near],
            false => aten::rows(&name).iter().map(|row| row.name).collect(),
        };
        if rows.iter().any(|row| meant.contains(row)) {
            continue;
        }
        found.push(match ops.contains(near) || rows.is_empty() {
            true => near.to_string(),
            false => format!("{name} ({})", rows.join(", ")),
        });
        meant.extend(rows);
    }
    found
}

/// Returns the error for a pattern that matches no module, with the classes, modules or nodes that exist.
fn no_module(subject: &Subject, pattern: &NamePattern, option: &str) -> Box<Error> {
    let target = Target::Modules(pattern.clone());
    let of_nodes = option != "--layers";
    if let Some(error) = of_nodes
        .then(|| only_fused(option, &target, subject))
        .flatten()
    {
        return error;
    }
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
