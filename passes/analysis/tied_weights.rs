//! Weights that an exporter stored twice, and warnings about several weights stored as one.
//!
//! Exporters fold the transpose of a head into a second initializer, although the head is tied to the embedding. Each copy
//! would get a part of the gradient, and an optimizer would drive the copies apart. [`ties`] finds such copies, so that the
//! pass `tie` can undo them. Exporters also merge weights that happen to hold equal values into one initializer; these get
//! one gradient. The file does not tell what was meant, so [`warnings`] says it.
//!
//! Equal contents alone do not prove a tie. Fresh models hold many ones and zeros, some initialise all layers alike, and
//! deep copies of a layer start equal. [`Evidence`] states what counts.

use super::params::Parameter;
use crate::error::near::nearest;
use crate::error::{Error, Result};
use crate::ir::{DType, Graph, NodeId, Tensor, ValueId};
use crate::ops;
use std::collections::{BTreeMap, BTreeSet};

/// Number of elements at which contents are examined before they are compared as a whole.
const SAMPLES: u64 = 4096;

/// Fewest different numbers in weights that are not equal by chance.
const LEAST_NUMBERS: usize = 16;

/// One in this many samples has to be a number of its own. Tables that repeat a row, such as the decay rates of state-space
/// layers, have fewer.
const SHARE: usize = 8;

/// Most warnings of each kind.
const SHOWN: usize = 3;

/// An initializer that holds the same weight as another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// The initializer that stays.
    pub kept: ValueId,
    /// The initializer that it replaces.
    pub copy: ValueId,
    /// The copy is the transpose.
    pub transposed: bool,
}

/// What the user said about tied weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TieRequest {
    /// Leave copies that were found as they are.
    pub leave: bool,
    /// Names of initializers or parameters to tie: the one that stays, and its copy.
    pub pairs: Vec<(String, String)>,
}

impl TieRequest {
    /// Reads `KEPT=COPY`.
    ///
    /// # Errors
    /// Text of another form.
    pub fn parse_pair(text: &str) -> Result<(String, String)> {
        match text.split_once('=') {
            Some((kept, copy)) if !kept.is_empty() && !copy.is_empty() => {
                Ok((kept.to_string(), copy.to_string()))
            }
            _ => Err(Error::usage("tie", "--tie takes two parameters")
                .expected("KEPT=COPY")
                .found(text)),
        }
    }
}

/// The outcome of the search for tied weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ties {
    /// Copies to undo.
    pub found: Vec<Tie>,
    /// Warnings about weights that are equal, but probably not tied.
    pub warnings: Vec<String>,
}

/// What two initializers of equal contents are to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    /// One weight: a table and a product that read it, or two copies of one parameter.
    Tied,
    /// Weights of different names or layers that start alike.
    Alike,
}

/// Finds the trained parameters of a typed forward graph that hold the same weight.
///
/// # Errors
/// A pair of the request that names no parameter, or whose contents differ.
pub fn ties(graph: &Graph, parameters: &[Parameter], request: &TieRequest) -> Result<Ties> {
    let trained: Vec<&Parameter> = parameters.iter().filter(|p| p.trainable).collect();
    let mut ties = Ties::default();
    let mut replaced: BTreeSet<ValueId> = BTreeSet::new();
    for (kept, copy) in &request.pairs {
        let tie = asked(graph, parameters, kept, copy)?;
        if replaced.insert(tie.copy) {
            ties.found.push(tie);
        }
    }
    if request.leave {
        return Ok(ties);
    }
    let mut groups: BTreeMap<Corners, Vec<&Parameter>> = BTreeMap::new();
    for parameter in trained.into_iter().filter(|p| !graph.is_output(p.value)) {
        if let Some(corners) = graph.value(parameter.value).tensor().and_then(corners) {
            groups.entry(corners).or_default().push(parameter);
        }
    }
    let mut alike = Vec::new();
    for group in groups.values().filter(|g| g.len() > 1) {
        for (later, b) in group.iter().enumerate() {
            for a in &group[..later] {
                let settled = |p: &&Parameter| replaced.contains(&p.value);
                if settled(a) || settled(b) {
                    continue;
                }
                let Some(transposed) = same_contents(graph, a.value, b.value) else {
                    continue;
                };
                let how = if transposed {
                    "the transpose of"
                } else {
                    "the same values as"
                };
                let name = |p: &Parameter| graph.value(p.value).name.clone();
                match evidence(graph, a, b) {
                    Some(Evidence::Tied) => {
                        // The table stays: lookups need its layout.
                        let (kept, copy) = match is_table(graph, b.value) && !is_table(graph, a.value) {
                            true => (b.value, a.value),
                            false => (a.value, b.value),
                        };
                        replaced.insert(copy);
                        ties.found.push(Tie { kept, copy, transposed });
                    }
                    Some(Evidence::Alike) => alike.push(format!(
                        "`{}` holds {how} `{}`: they are trained as two weights; if they are one tied weight, use \
                         --tie {}={}",
                        name(b),
                        name(a),
                        name(a),
                        name(b)
                    )),
                    None => {}
                }
            }
        }
    }
    ties.warnings = capped(alike);
    Ok(ties)
}

/// Returns the tie that the user asks for.
fn asked(graph: &Graph, parameters: &[Parameter], kept: &str, copy: &str) -> Result<Tie> {
    let find = |name: &str| {
        let known = |p: &&Parameter| {
            let initializer = &graph.value(p.value).name;
            p.name == name || initializer == name || p.aliases.iter().any(|a| a == name)
        };
        let found = parameters.iter().find(known).map(|p| p.value);
        found.ok_or_else(|| {
            let known: Vec<&str> = parameters.iter().map(|p| p.name.as_str()).collect();
            let near = nearest(name, known.iter().copied(), 1);
            let error = Error::usage("tie", format!("--tie: there is no parameter `{name}`"));
            match near.first() {
                Some(near) => error.help(format!("did you mean `{near}`?")),
                None => error.help("`ckpt-opt inspect MODEL` lists the parameters"),
            }
        })
    };
    let (kept, copy) = (find(kept)?, find(copy)?);
    let name = |id: ValueId| &graph.value(id).name;
    let refuse = |what: &str| {
        Error::usage(
            "tie",
            format!("--tie: `{}` and `{}` {what}", name(kept), name(copy)),
        )
        .expected("two initializers with equal contents, or one the transpose of the other")
    };
    if kept == copy {
        return Err(refuse("are one initializer already"));
    }
    if graph.is_output(copy) {
        return Err(refuse(
            "cannot be tied, because the second is a graph output",
        ));
    }
    match same_contents(graph, kept, copy) {
        Some(transposed) => Ok(Tie {
            kept,
            copy,
            transposed,
        }),
        None => Err(refuse("hold different values")),
    }
}

/// Returns whether two initializers with equal contents are one weight; `None` where their contents tell nothing.
fn evidence(graph: &Graph, a: &Parameter, b: &Parameter) -> Option<Evidence> {
    let names = |p: &Parameter| -> Option<BTreeSet<String>> {
        let origin = graph.origins.get(&p.value)?;
        let told = !origin.names.is_empty() && origin.is_parameter == Some(true);
        told.then(|| origin.names.iter().cloned().collect())
    };
    match (names(a), names(b)) {
        (Some(a), Some(b)) if !a.is_disjoint(&b) => return Some(Evidence::Tied),
        // The framework knows two weights.
        (Some(_), Some(_)) => return is_random(graph, a.value).then_some(Evidence::Alike),
        _ => {}
    }
    if !is_random(graph, a.value) {
        return None;
    }
    if is_table(graph, a.value) != is_table(graph, b.value) {
        return Some(Evidence::Tied);
    }
    let (own, other) = (&graph.value(a.value).name, &graph.value(b.value).name);
    let of_modules = own.contains('.') && other.contains('.');
    let paths = (modules(graph, a.value), modules(graph, b.value));
    let of_layers = paths.0 != paths.1 && plain(&paths.0) == plain(&paths.1);
    Some(match of_modules || of_layers {
        true => Evidence::Alike,
        false => Evidence::Tied,
    })
}

/// Returns module paths without numbers.
fn plain(paths: &BTreeSet<String>) -> BTreeSet<String> {
    let digits = |c: char| c.is_ascii_digit();
    paths.iter().map(|p| p.replace(digits, "")).collect()
}

/// Returns the modules whose nodes read a value, perhaps in another layout.
fn modules(graph: &Graph, value: ValueId) -> BTreeSet<String> {
    let readers = readers(graph, value);
    let path = |node: &NodeId| graph.node(*node).loc.scopes.last().map(|(p, _)| p.clone());
    readers.iter().filter_map(path).collect()
}

/// Returns true if a lookup reads the value.
fn is_table(graph: &Graph, value: ValueId) -> bool {
    let readers = readers(graph, value);
    readers
        .iter()
        .any(|n| graph.node(*n).op == &ops::index::GATHER)
}

/// Returns the forward nodes that compute with a value; layout and precision do not count.
fn readers(graph: &Graph, value: ValueId) -> Vec<NodeId> {
    let mut values = vec![value];
    let mut found = Vec::new();
    while let Some(value) = values.pop() {
        for reader in graph.value(value).uses() {
            let node = graph.node(reader.node);
            if !node.is_forward() {
                continue;
            }
            match node.op.is_layout() || node.op == &ops::cast::CAST {
                true => values.extend(&node.outs),
                false => found.push(reader.node),
            }
        }
    }
    found
}

fn capped(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(SHOWN);
    lines.truncate(SHOWN);
    if let Some(last) = lines.last_mut()
        && more > 0
    {
        last.push_str(&format!(" (and {more} more like it)"));
    }
    lines
}

/// Returns true if the contents have too many different numbers to be equal by chance.
fn is_random(graph: &Graph, value: ValueId) -> bool {
    let Some((tensor, bytes)) = graph
        .value(value)
        .tensor()
        .and_then(|t| Some((t, t.bytes()?)))
    else {
        return false;
    };
    let (size, total) = (tensor.dtype.size_bytes(), tensor.elements());
    // The step is odd, so that samples lie in many rows and columns of common sizes.
    let step = (total / SAMPLES).max(1) | 1;
    let count = SAMPLES.min(total);
    let sample = |k: u64| {
        let from = usize::try_from(k.wrapping_mul(step) % total * size).ok()?;
        bytes.get(from..from + size as usize)
    };
    let numbers: BTreeSet<&[u8]> = (0..count).filter_map(sample).collect();
    numbers.len() >= LEAST_NUMBERS && numbers.len() * SHARE >= count as usize
}

/// Type, number of elements, first and last element, which a tensor and its transpose share.
type Corners = (DType, u64, Vec<u8>, Vec<u8>);

fn corners(tensor: &Tensor) -> Option<Corners> {
    let (bytes, size) = (tensor.bytes()?, tensor.dtype.size_bytes() as usize);
    if tensor.elements() < 2 {
        return None;
    }
    let first = bytes.get(..size)?.to_vec();
    let last = bytes.get(bytes.len() - size..)?.to_vec();
    Some((tensor.dtype, tensor.elements(), first, last))
}

/// Returns `Some(false)` if two initializers are equal bit for bit, `Some(true)` if one is the transpose of the other.
fn same_contents(graph: &Graph, a: ValueId, b: ValueId) -> Option<bool> {
    let (a, b) = (graph.value(a).tensor()?, graph.value(b).tensor()?);
    let (own, other) = (a.bytes()?, b.bytes()?);
    if a.dtype != b.dtype || own.len() != other.len() {
        return None;
    }
    if a.dims == b.dims && own == other {
        return Some(false);
    }
    let ([rows, columns], [m, n]) = (a.dims.as_slice(), b.dims.as_slice()) else {
        return None;
    };
    if (rows, columns) != (n, m) {
        return None;
    }
    let size = a.dtype.size_bytes() as usize;
    let (rows, columns) = (*rows as usize, *columns as usize);
    let row_is_column = |r: usize| {
        let row = own[r * columns * size..(r + 1) * columns * size].chunks_exact(size);
        row.enumerate().all(|(c, element)| {
            let at = (c * rows + r) * size;
            element == &other[at..at + size]
        })
    };
    (0..rows).all(row_is_column).then_some(true)
}

/// Returns the warnings about trainable parameters that several modules share, one line each.
pub fn warnings(graph: &Graph, parameters: &[Parameter]) -> Vec<String> {
    let trained: Vec<&Parameter> = parameters.iter().filter(|p| p.trainable).collect();
    capped(merged(graph, &trained))
}

/// Returns warnings about parameters that several modules read, none of them as a table, as a tied embedding would be.
fn merged(graph: &Graph, trained: &[&Parameter]) -> Vec<String> {
    let mut lines = Vec::new();
    for parameter in trained {
        let modules = modules(graph, parameter.value);
        if modules.len() > 1 && !is_table(graph, parameter.value) {
            let all: Vec<String> = modules.into_iter().take(SHOWN).collect();
            lines.push(format!(
                "`{}` is trained as one weight of several modules ({}): if they did not share it, the exporter merged \
                 weights of equal values, so export weights that differ (a checkpoint, not a fresh model) or --freeze it",
                graph.value(parameter.value).name,
                all.join(", ")
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::params::{Selection, parameters};
    use crate::text;

    fn found(source: &str, request: &TieRequest) -> Result<Ties> {
        let graph = text::parse(source).unwrap();
        ties(
            &graph,
            &parameters(&graph, &Selection::default()).unwrap(),
            request,
        )
    }

    /// A table of `rows` × 4 numbers that repeat after `period`, and a weight for products: `values` in rows of `rows`.
    fn twice(rows: usize, period: usize, head: &dyn Fn(usize) -> usize, names: &str) -> String {
        let table: Vec<String> = (0..rows * 4).map(|i| (i % period).to_string()).collect();
        let values: Vec<String> = (0..rows * 4).map(|i| head(i).to_string()).collect();
        format!(
            "graph @g typed (%i: i64[n]) -> (%y) {{
  init %table : f32[{rows}, 4] = [{}]{names}
  init %head : f32[4, {rows}] = [{}]
  %e = Gather %table, %i : f32[n, 4]
  %y = MatMul %e, %head : f32[n, {rows}]
}}
",
            table.join(", "),
            values.join(", ")
        )
    }

    fn transpose(rows: usize, period: usize) -> impl Fn(usize) -> usize {
        move |i| (i % rows * 4 + i / rows) % period
    }

    #[test]
    fn a_table_and_the_head_made_of_it_are_one_weight() {
        let auto = TieRequest::default();
        let told = found(&twice(9, 100, &transpose(9, 100), ""), &auto).unwrap();
        let [tie] = told.found.as_slice() else {
            panic!("{told:?}")
        };
        assert!(tie.transposed);
        // One number differs.
        let other = |i: usize| transpose(9, 100)(i) + usize::from(i == 20);
        assert_eq!(
            found(&twice(9, 100, &other, ""), &auto).unwrap(),
            Ties::default()
        );
        let leave = TieRequest {
            leave: true,
            ..TieRequest::default()
        };
        let source = twice(9, 100, &transpose(9, 100), "");
        assert_eq!(found(&source, &leave).unwrap(), Ties::default());
    }

    #[test]
    fn constants_and_repeated_rows_are_no_evidence() {
        let auto = TieRequest::default();
        for period in [1, 2, 4, 15] {
            let source = twice(9, period, &transpose(9, period), "");
            assert_eq!(found(&source, &auto).unwrap(), Ties::default(), "{period}");
        }
        // Many numbers, but few of the thousands of elements.
        let source = twice(300, 20, &transpose(300, 20), "");
        assert_eq!(found(&source, &auto).unwrap(), Ties::default());
        let pairs = vec![("table".to_string(), "head".to_string())];
        let asked = TieRequest { leave: true, pairs };
        assert_eq!(found(&source, &asked).unwrap().found.len(), 1);
    }

    #[test]
    fn equal_layers_are_told_of_and_not_tied() {
        let source = |first: &str, second: &str| {
            let values: Vec<String> = (0..25).map(|i| i.to_string()).collect();
            let values = values.join(", ");
            format!(
                "graph @g typed (%x: f32[n, 5]) -> (%z) {{
  init %a : f32[5, 5] = [{values}]
  init %b : f32[5, 5] = [{values}]
scope {first}:
  %y = MatMul %x, %a : f32[n, 5]
scope {second}:
  %z = MatMul %y, %b : f32[n, 5]
}}
"
            )
        };
        let auto = TieRequest::default();
        let layers = found(&source("\"layers.0.fc\"", "\"layers.1.fc\""), &auto).unwrap();
        assert!(
            layers.found.is_empty() && layers.warnings.len() == 1,
            "{layers:?}"
        );
        assert!(layers.warnings[0].contains("use --tie a=b"), "{layers:?}");
        // One module that is called twice.
        let shared = found(&source("\"shared.fc\"", "\"shared.fc\""), &auto).unwrap();
        assert_eq!(shared.found.len(), 1);
    }

    #[test]
    fn names_of_the_framework_decide() {
        let auto = TieRequest::default();
        let named = |head: &str| {
            let source = twice(
                9,
                100,
                &transpose(9, 100),
                " origin \"table.weight\" parameter",
            );
            source.replacen(
                "]\n  %e",
                &format!("] origin \"{head}\" transposed parameter\n  %e"),
                1,
            )
        };
        assert_eq!(found(&named("table.weight"), &auto).unwrap().found.len(), 1);
        let apart = found(&named("head.weight"), &auto).unwrap();
        assert!(
            apart.found.is_empty() && apart.warnings.len() == 1,
            "{apart:?}"
        );
    }

    #[test]
    fn a_weight_of_several_modules_is_told_of() {
        let source = |second: &str, op: &str| {
            let mut graph = text::parse(&format!(
                "graph @g typed (%x: f32[n, 2], %i: i64[n]) -> (%y, %z) {{
  init %w : f32[2, 2] = [1, 2, 3, 4]
  %y = MatMul %x, %w : f32[n, 2]
  %t = Transpose %w {{perm=[1, 0]}} : f32[2, 2]
  %z = {op} : f32[n, 2]
}}
"
            ))
            .unwrap();
            let order = graph.order().to_vec();
            for (id, path) in [(order[0], "layers.0.fc"), (order[2], second)] {
                let loc = crate::ir::Loc {
                    node: String::new(),
                    scopes: vec![(path.to_string(), None)],
                };
                graph.set_loc(id, std::sync::Arc::new(loc));
            }
            warnings(&graph, &parameters(&graph, &Selection::default()).unwrap())
        };
        let product = "MatMul %x, %t";
        assert!(source("layers.0.fc", product).is_empty());
        let told = source("layers.1.fc", product);
        assert!(
            told.len() == 1 && told[0].contains("(layers.0.fc, layers.1.fc)"),
            "{told:?}"
        );
        assert!(source("embedding", "Gather %w, %i").is_empty());
    }
}
