//! Tensors of a training run and the initializers of a model.
//!
//! A tensor may have the name of an initializer (`val_39`), then it is in the initializer's layout, or a name that the
//! framework has for it (`fc.weight`), then it is in the framework's. `.updated` behind either is what a step with an optimizer
//! calls the new value.

use crate::tensors::Tensors;
use crate::tensors::framework::transposed;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::analysis::tied_weights::{TieRequest, ties};
use ckpt_passes::error::near::nearest;
use ckpt_passes::ir::{DType, Graph, Tensor, ValueId};
use ckpt_passes::transform::optimizer::{STATES, UPDATED};
use ckpt_passes::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// What was matched.
pub struct Matched {
    /// The initializers that have a value among the tensors.
    pub given: BTreeSet<ValueId>,
    /// New contents of the initializers that differ from the model's.
    pub changed: BTreeMap<ValueId, New>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// New contents of an initializer. They stay as they were given, for example pages of a file, until they are read.
#[derive(Clone, Debug)]
pub struct New {
    given: Tensor,
    transposed: bool,
    dtype: DType,
}

impl New {
    /// Returns the contents in the layout and type of the initializer.
    pub fn tensor(&self) -> Tensor {
        let turned = self.transposed.then(|| transposed(&self.given)).flatten();
        let tensor = turned.unwrap_or_else(|| self.given.clone());
        if tensor.dtype == self.dtype {
            return tensor;
        }
        let numbers = (0..tensor.elements() as usize).filter_map(|i| tensor.get_f64(i));
        Tensor::rounded(self.dtype, &tensor.dims, numbers)
    }
}

/// A name of an initializer.
struct Named {
    id: ValueId,
    transposed: bool,
}

/// The error for tensors of which none has the name of a weight.
pub(super) fn none_matched() -> Box<Error> {
    Error::usage("weights", "no tensor has the name of a weight of the model")
        .help("`ckpt-opt inspect MODEL` lists the parameters")
}

/// Matches tensors to the initializers of a typed model.
///
/// # Errors
/// A shape or type that does not fit, two values for one weight, a file that matches nothing.
pub fn matched(graph: &Graph, tensors: &Tensors) -> Result<Matched> {
    let names = names(graph);
    let mut warnings = Vec::new();
    let mut found: BTreeMap<ValueId, (String, New)> = BTreeMap::new();
    let mut unknown = Vec::new();
    for (name, tensor) in tensors {
        let plain = name.strip_suffix(UPDATED).unwrap_or(name);
        let Some(named) = names.get(plain) else {
            if !is_no_weight(plain) {
                unknown.push(plain);
            }
            continue;
        };
        let new = fitted(graph, plain, named, tensor)?;
        match found.get(&named.id) {
            Some((other, first)) if first.tensor().bytes() != new.tensor().bytes() => {
                let what =
                    format!("`{plain}` and `{other}` are one weight and hold different values");
                return Err(Error::usage("weights", what));
            }
            Some(_) => {}
            None => {
                found.insert(named.id, (plain.into(), new));
            }
        }
    }
    if let Some(first) = unknown.first() {
        let near = nearest(first, names.keys().map(String::as_str), 1);
        let near = near
            .first()
            .map_or(String::new(), |n| format!("; did you mean `{n}`?"));
        warnings.push(format!(
            "{} tensors have no weight of that name in the model, such as `{first}`{near}",
            unknown.len()
        ));
    }
    let differs = |id: &ValueId, new: &New| {
        let old = graph.value(*id).tensor();
        old.is_none_or(|old| old.bytes().is_none() || old.bytes() != new.tensor().bytes())
    };
    let given = found.keys().copied().collect();
    let changed = found.into_iter().map(|(id, (_, new))| (id, new));
    Ok(Matched {
        given,
        changed: changed.filter(|(id, new)| differs(id, new)).collect(),
        warnings,
    })
}

/// Returns true for what a training step also outputs: states, gradients, the loss and the like.
fn is_no_weight(name: &str) -> bool {
    name.ends_with(".grad") || STATES.iter().any(|end| name.ends_with(end)) || !name.contains('.')
}

/// Returns every name of every initializer. A name that is both its own and the framework's is the framework's.
fn names(graph: &Graph) -> BTreeMap<String, Named> {
    let mut names = BTreeMap::new();
    for (id, origin) in &graph.origins {
        let is_matrix = graph.contains_value(*id) && graph.ty(*id).rank() == 2;
        for name in origin.names.iter().filter(|_| graph.contains_value(*id)) {
            let transposed = origin.transposed && is_matrix;
            names.insert(
                name.clone(),
                Named {
                    id: *id,
                    transposed,
                },
            );
        }
    }
    for (id, value) in graph.inits() {
        let own = Named {
            id,
            transposed: false,
        };
        names.entry(value.name.clone()).or_insert(own);
    }
    names
}

/// Checks that a tensor fits an initializer.
fn fitted(graph: &Graph, name: &str, named: &Named, given: &Tensor) -> Result<New> {
    if given.bytes().is_none() {
        let what = format!("the content of `{name}` is absent");
        return Err(Error::environment("weights", what));
    }
    let own = graph.value(named.id).tensor();
    let own = own.ok_or_else(|| Error::bug("weights", "a name of no initializer"))?;
    let mut dims = given.dims.clone();
    if named.transposed {
        dims.reverse();
    }
    if own.dims != dims {
        return Err(misfit(graph, name, named, given));
    }
    if own.dtype != given.dtype && !(own.dtype.is_float() && given.dtype.is_float()) {
        return Err(
            Error::usage("weights", format!("`{name}` has another element type"))
                .expected(own.dtype.to_string())
                .found(given.dtype.to_string()),
        );
    }
    Ok(New {
        given: given.clone(),
        transposed: named.transposed,
        dtype: own.dtype,
    })
}

fn misfit(graph: &Graph, name: &str, named: &Named, tensor: &Tensor) -> Box<Error> {
    let mut dims = graph
        .value(named.id)
        .tensor()
        .map_or(Vec::new(), |t| t.dims.clone());
    if named.transposed {
        dims.reverse();
    }
    Error::usage(
        "weights",
        format!("`{name}` has another shape than in the model"),
    )
    .expected(format!("{dims:?}"))
    .found(format!("{:?}", tensor.dims))
}

/// Initializers that are copies of one weight, and whether each is the transpose of the other.
pub type Copies = Vec<(ValueId, ValueId, bool)>;

/// Returns the copies that an exporter wrote of tied weights.
///
/// # Errors
/// See [`parameters`].
pub fn copies(graph: &Graph) -> Result<Copies> {
    let parameters = parameters(graph, &Selection::default())?;
    let found = ties(graph, &parameters, &TieRequest::default())?.found;
    let each = found
        .iter()
        .flat_map(|t| [(t.kept, t.copy), (t.copy, t.kept)].map(|(a, b)| (a, b, t.transposed)));
    Ok(each.collect())
}
