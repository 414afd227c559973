//! Warnings about weights that an exporter may have changed: one stored twice, or several stored as one.
//!
//! Exporters write a tied weight a second time, transposed, and merge weights that happen to hold equal values into one
//! initializer. A weight stored twice gets two gradients, merged weights get one. Either may be intended, so both only
//! cause warnings. Contents are compared at samples spread over the tensor, not read as a whole.

use super::params::Parameter;
use crate::ir::{DType, Graph, Tensor, ValueId};
use crate::ops;
use std::collections::{BTreeMap, BTreeSet};

/// Number of elements at which two tensors of the same sizes have to agree to count as one.
const SAMPLES: u64 = 256;

/// Most warnings of each kind.
const SHOWN: usize = 3;

/// Returns the warnings about the trainable parameters of a typed graph, one line each.
pub fn warnings(graph: &Graph, parameters: &[Parameter]) -> Vec<String> {
    let trained: Vec<&Parameter> = parameters.iter().filter(|p| p.trainable).collect();
    let mut lines = capped(duplicates(graph, &trained));
    lines.extend(capped(merged(graph, &trained)));
    lines
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

/// What identifies contents: type, sizes, and [`SAMPLES`] elements in row-major order.
type Contents = (DType, Vec<u64>, Vec<u8>);

/// Returns elements spread over a matrix or larger tensor, or over its transpose if `flip`. Returns `None` where they are
/// all the same or not available.
fn contents(tensor: &Tensor, flip: bool) -> Option<Contents> {
    let (bytes, size) = (tensor.bytes()?, tensor.dtype.size_bytes());
    let mut dims = tensor.dims.clone();
    if flip {
        dims.reverse();
    }
    let total = tensor.elements();
    let element = |place: u64| {
        let at = match flip {
            true => place % dims[1] * dims[0] + place / dims[1],
            false => place,
        };
        let from = usize::try_from(at * size).ok()?;
        bytes.get(from..from + size as usize)
    };
    // The step is odd, so that samples lie in many rows and columns of common sizes.
    let step = (total / SAMPLES).max(1) | 1;
    let mut found = Vec::new();
    for k in 0..SAMPLES.min(total) {
        found.extend_from_slice(element(k.wrapping_mul(step) % total)?);
    }
    let first = &found[..size as usize];
    let same = found.chunks(size as usize).all(|e| e == first);
    (!same).then_some((tensor.dtype, dims, found))
}

/// Type, number of elements, first and last element, which a tensor and its transpose share.
type Corners = (DType, u64, Vec<u8>, Vec<u8>);

fn corners(tensor: &Tensor) -> Option<Corners> {
    let (bytes, size) = (tensor.bytes()?, tensor.dtype.size_bytes() as usize);
    let first = bytes.get(..size)?.to_vec();
    let last = bytes.get(bytes.len() - size..)?.to_vec();
    Some((tensor.dtype, tensor.elements(), first, last))
}

/// Returns warnings about pairs of matrices or larger tensors with the same contents, perhaps transposed.
fn duplicates(graph: &Graph, trained: &[&Parameter]) -> Vec<String> {
    let mut seen: BTreeMap<Contents, ValueId> = BTreeMap::new();
    let mut alike: BTreeMap<Corners, usize> = BTreeMap::new();
    for tensor in trained.iter().filter_map(|p| graph.value(p.value).tensor()) {
        if let Some(corners) = corners(tensor) {
            *alike.entry(corners).or_default() += 1;
        }
    }
    let mut lines = Vec::new();
    let name = |id: ValueId| graph.value(id).name.as_str();
    for parameter in trained {
        let Some(tensor) = graph.value(parameter.value).tensor() else {
            continue;
        };
        if tensor.dims.len() < 2 || tensor.elements() < 2 {
            continue;
        }
        // Most weights differ from all others at their corners, and are not examined.
        if corners(tensor).is_none_or(|c| alike.get(&c).is_none_or(|n| *n < 2)) {
            continue;
        }
        let Some(own) = contents(tensor, false) else {
            continue;
        };
        let turned = (tensor.dims.len() == 2)
            .then(|| contents(tensor, true))
            .flatten();
        let as_is = seen.get(&own).map(|id| (*id, "the same values as"));
        let flipped = turned.and_then(|t| seen.get(&t).map(|id| (*id, "the transpose of")));
        match as_is.or(flipped) {
            Some((other, how)) => lines.push(format!(
                "`{}` holds {how} `{}`: if that is one tied weight, its gradient is the sum of both",
                name(parameter.value),
                name(other)
            )),
            None => {
                seen.insert(own, parameter.value);
            }
        }
    }
    lines
}

/// Returns warnings about parameters that several modules read, none of them as a table, as a tied embedding would be.
fn merged(graph: &Graph, trained: &[&Parameter]) -> Vec<String> {
    let mut lines = Vec::new();
    for parameter in trained {
        let mut modules: BTreeSet<&str> = BTreeSet::new();
        let mut looked_up = false;
        let mut values = vec![parameter.value];
        while let Some(value) = values.pop() {
            for reader in graph.value(value).uses() {
                let node = graph.node(reader.node);
                if !node.is_forward() {
                    continue;
                }
                if node.op.is_layout() || node.op == &ops::cast::CAST {
                    values.extend(&node.outs);
                    continue;
                }
                looked_up |= node.op == &ops::index::GATHER;
                if let Some((path, _)) = node.loc.scopes.last() {
                    modules.insert(path);
                }
            }
        }
        if modules.len() > 1 && !looked_up {
            let all: Vec<&str> = modules.into_iter().take(SHOWN).collect();
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

    fn of(source: &str, freeze: &[&str]) -> Vec<String> {
        let graph = text::parse(source).unwrap();
        let selection = Selection {
            freeze: freeze.iter().map(|s| s.to_string()).collect(),
            ..Selection::default()
        };
        warnings(&graph, &parameters(&graph, &selection).unwrap())
    }

    const TWICE: &str = "graph @g typed (%x: f32[n, 2], %i: i64[n]) -> (%y, %z, %e) {
  init %table : f32[3, 2] = [1, 2, 3, 4, 5, 6]
  init %head : f32[2, 3] = [1, 3, 5, 2, 4, 6]
  init %other : f32[2, 3] = [1, 3, 5, 2, 4, 7]
  init %zeros : f32[2, 3] = [0, 0, 0, 0, 0, 0]
  init %none : f32[2, 3] = [0, 0, 0, 0, 0, 0]
  %e = Gather %table, %i : f32[n, 2]
  %y = MatMul %e, %head : f32[n, 3]
  %a = MatMul %x, %other : f32[n, 3]
  %b = MatMul %x, %zeros : f32[n, 3]
  %c = MatMul %x, %none : f32[n, 3]
  %z = Sum %a, %b, %c : f32[n, 3]
}
";

    #[test]
    fn a_weight_stored_twice_is_told_of() {
        let told = of(TWICE, &[]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(
            told[0].contains("`head` holds the transpose of `table`"),
            "{told:?}"
        );
        assert!(of(TWICE, &["table"]).is_empty());
        let same = TWICE.replace("[1, 3, 5, 2, 4, 7]", "[1, 3, 5, 2, 4, 6]");
        assert!(of(&same, &["table"])[0].contains("`other` holds the same values as `head`"));
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
