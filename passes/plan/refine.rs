//! What a user's overrides mean in a graph: which ops are subject to the policy, and which ones it has no say about.
//!
//! A wish that matches nothing is an error that lists what there is, near misses first: a policy that silently did
//! not apply would look like one that saves nothing.

use super::constraint::{Constraint, Constraints, Forced, Place};
use super::input::{Part, PlanInput};
use super::overrides::{NamePattern, Override, PolicyOverrides, Target};
use super::problem::{Phase, Problem};
use super::saved_set::{Pinned, pinned};
use crate::analysis::modules::{self, Modules};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node};
use crate::near::nearest;
use crate::ops::{self, aten};
use std::collections::{BTreeMap, BTreeSet};

/// Longer lists of names are cut in messages.
const MOST_NAMES: usize = 40;

/// Settles the overrides for the graph that `subject` was made from.
///
/// # Errors
/// A pattern or op that matches nothing; a wish to run again what cannot be.
pub fn refine(
    overrides: &PolicyOverrides,
    graph: &Graph,
    subject: &PlanInput,
) -> Result<Constraints> {
    let structure = &subject.structure;
    let mut choices = Constraints::none(structure);
    if overrides.is_empty() {
        return Ok(choices);
    }
    if overrides.restrict() {
        choices.place = places(overrides, graph, subject)?;
        choices.units = renumber(&mut choices.place);
        if choices.units == 0 && structure.blocks > 0 {
            return Err(Error::usage(
                "selection",
                "no layer lies in what --scope leaves",
            ));
        }
        if overrides.every.is_some() || overrides.first.is_some() {
            count(overrides, &mut choices)?;
        }
        choices.leave_frozen(structure);
    }
    let pins = pinned(&subject.problem);
    let roots = subject.problem.roots();
    for wish in &overrides.overrides {
        force(wish, graph, subject, &mut choices, &pins, &roots)?;
    }
    Ok(choices)
}

/// The unit of each op after `--layers` and `--scope`.
fn places(overrides: &PolicyOverrides, graph: &Graph, subject: &PlanInput) -> Result<Vec<Place>> {
    let structure = &subject.structure;
    let nodes = &subject.map.nodes;
    let mut places: Vec<Place> = if overrides.layers.is_empty() {
        let place = |block: &Option<usize>| match block {
            Some(block) => Place::Unit(*block),
            // Without layers a scope counts as one.
            None if structure.blocks == 0 && !overrides.scope.is_empty() => Place::Unit(0),
            None => Place::NoLayer,
        };
        structure.block_of.iter().map(place).collect()
    } else {
        for pattern in &overrides.layers {
            let hits = |(path, class): (&&str, &Option<&str>)| chosen(pattern, path, *class);
            if !modules::paths(graph).iter().any(hits) {
                return Err(no_module(graph, subject, pattern, "--layers"));
            }
        }
        let any = |path: &str, class: Option<&str>| {
            overrides
                .layers
                .iter()
                .any(|pattern| chosen(pattern, path, class))
        };
        let modules = Modules::new(graph, &any);
        let unit = |m: Option<u32>| m.map_or(Place::Elsewhere, |m| Place::Unit(m as usize));
        nodes.iter().map(|n| unit(modules.of[*n])).collect()
    };
    if !overrides.scope.is_empty() {
        let mut inside = vec![false; nodes.len()];
        for pattern in &overrides.scope {
            let modules = Modules::new(graph, &|path, class| chosen(pattern, path, class));
            let mut hit = false;
            for (op, id) in nodes.iter().enumerate() {
                let node = graph.node(*id);
                if subject.problem.ops[op].phase == Phase::Forward
                    && (modules.of[*id].is_some() || named(pattern, node))
                {
                    inside[op] = true;
                    hit = true;
                }
            }
            if !hit {
                return Err(no_module(graph, subject, pattern, "--scope"));
            }
        }
        for (place, inside) in places.iter_mut().zip(inside) {
            if !inside {
                *place = Place::Elsewhere;
            }
        }
    }
    Ok(places)
}

/// Numbers the units that are left anew, in order of their old numbers. Returns how many there are.
fn renumber(places: &mut [Place]) -> usize {
    let left: BTreeSet<usize> = places.iter().filter_map(|p| p.unit()).collect();
    let new: BTreeMap<usize, usize> = left.into_iter().zip(0..).collect();
    for place in places {
        if let Place::Unit(unit) = place {
            *unit = new[unit];
        }
    }
    new.len()
}

/// `--every` and `--first`.
fn count(overrides: &PolicyOverrides, choices: &mut Constraints) -> Result<()> {
    if choices.units == 0 {
        return Err(Error::usage(
            "selection",
            "--every and --first count layers, and no repeated layers were found",
        )
        .help("name modules with --layers"));
    }
    let counted = |unit: usize| {
        overrides.every.is_none_or(|n| (unit + 1) % n == 0)
            && overrides.first.is_none_or(|n| unit < n)
    };
    for place in &mut choices.place {
        // Neither is what belongs to no layer at all.
        if !place.unit().is_some_and(counted) {
            *place = Place::Elsewhere;
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
    wish: &Override,
    graph: &Graph,
    subject: &PlanInput,
    choices: &mut Constraints,
    pins: &[Option<Pinned>],
    roots: &[usize],
) -> Result<()> {
    let problem = &subject.problem;
    let found: Vec<usize> = (0..problem.ops.len())
        .filter(|op| {
            problem.ops[*op].phase == Phase::Forward && is_meant(wish, graph, subject, *op)
        })
        .collect();
    if found.is_empty() {
        return Err(never(wish, graph, subject));
    }
    // A module or node that is named is meant wherever it lies; an op only where the policy applies.
    let by_name = matches!(wish.target, Target::Modules(_));
    let subject_to = |op: &usize| !matches!(choices.place[*op], Place::Elsewhere | Place::Frozen);
    let there: Vec<usize> = found
        .iter()
        .copied()
        .filter(|op| by_name || subject_to(op))
        .collect();
    if there.is_empty() {
        return Err(Error::usage(
            "selection",
            format!("{wish} matches only ops that the policy leaves alone"),
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
            if wish.choice == Constraint::Recompute && (owner != op || stuck) {
                continue;
            }
            settled = true;
            choices.forced[owner] = Some(Forced {
                choice: wish.choice,
                by: wish.to_string(),
            });
        }
    }
    if wish.choice == Constraint::Recompute && !settled {
        return Err(Error::usage(
            "selection",
            format!("{wish} matches only what is never computed again"),
        )
        .found("views, graph outputs, small integer values, or ops that must not run twice"));
    }
    Ok(())
}

/// The forward ops that own the storages of an op's results: itself, unless it makes views.
fn owners(problem: &Problem, roots: &[usize], op: usize) -> BTreeSet<usize> {
    let storages = problem.ops[op].outs.iter().map(|v| roots[*v]);
    storages
        .filter_map(|root| problem.values[root].producer)
        .collect()
}

fn is_meant(wish: &Override, graph: &Graph, subject: &PlanInput, op: usize) -> bool {
    let node = graph.node(subject.map.nodes[op]);
    match &wish.target {
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
            let part = subject.blocks.role[subject.map.nodes[op]];
            aten::rows(name).contains(&node.op)
                || (aten::is_attention(name)
                    && (part.is_some() || subject.structure.part_of[op] == Part::FusedAttention))
        }
    }
}

/// Why an override matches nothing, and what it could have been.
fn never(wish: &Override, graph: &Graph, subject: &PlanInput) -> Box<Error> {
    let forward = subject.problem.ops.iter().enumerate();
    let forward = forward.filter(|(_, op)| op.phase == Phase::Forward);
    let nodes = || {
        forward
            .clone()
            .map(|(o, _)| graph.node(subject.map.nodes[o]))
    };
    let ops: BTreeSet<&str> = nodes().map(|n| n.op.name).collect();
    match &wish.target {
        Target::Row(row) => Error::usage(
            "selection",
            format!("{wish}: the model has no {}", row.name),
        )
        .found(format!("ops {}", listed(row.name, ops))),
        Target::Traced { name, .. } => {
            let traced = nodes()
                .filter_map(|n| modules::traced(n))
                .map(|(name, _)| name);
            let is_here = |name: &&str| {
                aten::is_attention(name) && !subject.blocks.attentions.is_empty()
                    || aten::rows(name).iter().any(|row| ops.contains(row.name))
            };
            let here = traced
                .chain(aten::names().into_iter().filter(is_here))
                .collect();
            let known = aten::names().contains(name.as_str());
            let what = match known {
                true => format!("{wish}: the model has no op that {name} becomes"),
                false => format!("{wish}: there is no op `{name}` that we know"),
            };
            Error::usage("selection", what).found(format!("ops {}", listed(name, here)))
        }
        Target::Nodes(pattern) => {
            let word = pattern.text();
            if word.contains(['*', '?', '/']) {
                let names = nodes().map(|n| n.name.as_str()).collect();
                return Error::usage("selection", format!("{wish} matches no node"))
                    .found(format!("nodes {}", listed(word, names)));
            }
            let rows = nearest(word, ops::all().map(|row| row.name), 3);
            let e = Error::usage(
                "selection",
                format!("{wish}: no op and no node has that name"),
            )
            .found(format!("ops {}", listed(word, ops)));
            match rows.as_slice() {
                [] => e.help("ONNX (MatMul) and ATen (aten.mm) spellings and node names are known"),
                near => e.help(format!("did you mean {}?", near.join(" or "))),
            }
        }
        Target::Modules(pattern) => no_module(graph, subject, pattern, wish.option()),
    }
}

/// The classes, modules or nodes that exist.
fn no_module(
    graph: &Graph,
    subject: &PlanInput,
    pattern: &NamePattern,
    option: &str,
) -> Box<Error> {
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
        return e.found(format!("modules {}", listed(text, paths)));
    }
    let names = subject
        .map
        .nodes
        .iter()
        .map(|n| graph.node(*n).name.as_str());
    let names: BTreeSet<&str> = names.take(subject.problem.ops.len()).collect();
    e = e.found(format!(
        "no module names in this file; nodes {}",
        listed(text, names)
    ));
    match subject.structure.blocks {
        0 => e,
        n => e.help(format!(
            "{n} layers were found by their structure: --every and --first count them"
        )),
    }
}

/// Names for a message: near misses first, then in alphabetical order.
fn listed(word: &str, names: BTreeSet<&str>) -> String {
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
