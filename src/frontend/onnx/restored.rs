//! Undoes functions that an exporter applied to parameters ahead of time, and warns about what cannot be undone.
//!
//! `exp(logit_scale)` is stored as its result. [`restore`] inverts the function, stores the parameter under its own name,
//! and adds the function as a node, so that the parameter is trained and not the result. Folded rows of a table or a batch
//! norm that was multiplied into a convolution cannot be inverted: [`warnings`] names them.

use super::exported::{Export, Relation};
use super::legacy::FOLDED;
use ckpt_passes::Result;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::ir::{Graph, Origin, Tensor, ValueId};
use ckpt_passes::ops::{self, Builder, EmitExt};
use std::collections::BTreeSet;

/// A function of one number with its inverse.
struct Function {
    /// PyTorch's name.
    name: &'static str,
    apply: fn(&mut Builder, ValueId) -> Result<ValueId>,
    inverse: fn(f64) -> f64,
}

const FUNCTIONS: &[Function] = &[
    Function {
        name: ADD,
        apply: |b, x| {
            let one = b.scalar_like(x, 1.0);
            b.add(x, one)
        },
        inverse: |y| y - 1.0,
    },
    Function {
        name: "exp",
        apply: |b, x| b.op(&ops::math::EXP, &[x]),
        inverse: f64::ln,
    },
    Function {
        name: "log",
        apply: |b, x| b.op(&ops::math::LOG, &[x]),
        inverse: f64::exp,
    },
    Function {
        name: "neg",
        apply: |b, x| b.neg(x),
        inverse: |y| -y,
    },
    Function {
        name: "reciprocal",
        apply: |b, x| b.op(&ops::math::RECIPROCAL, &[x]),
        inverse: f64::recip,
    },
    Function {
        name: "sigmoid",
        apply: |b, x| b.op(&ops::activation::SIGMOID, &[x]),
        inverse: |y| (y / (1.0 - y)).ln(),
    },
    Function {
        name: "tanh",
        apply: |b, x| b.op(&ops::activation::TANH, &[x]),
        inverse: f64::atanh,
    },
];

/// PyTorch's addition of a constant, which the file no longer holds. The constant is assumed to be 1, as in norms that compute
/// `1 + weight`, and a warning says so. The gradient is right for any constant.
const ADD: &str = "add";

/// PyTorch's ops that repeat a tensor along an axis. A vision model repeats its class token once for each image.
const REPEATS: &[&str] = &["expand", "repeat"];

/// An inverted parameter may differ from the exact one by this many units of rounding, relative to the larger of 1 and its
/// magnitude.
const ROUNDINGS: f64 = 2.0;

/// Most initializers without a name that a warning lists.
const SHOWN: usize = 6;

/// Replaces initializers that hold a function of a parameter by the parameter and the function. Returns the names of the
/// parameters to which a constant was added.
///
/// # Errors
/// Those of type inference: our bug.
pub fn restore(graph: &mut Graph, export: &Export) -> Result<Vec<String>> {
    let mut raised = Vec::new();
    let folded: Vec<ValueId> = graph.origins.keys().copied().collect();
    let mut first = Vec::new();
    for id in folded {
        let (origin, value) = (&graph.origins[&id], graph.value(id));
        let relation = export.relation(&value.name, value.ty().rank());
        let ([parameter], functions, transposed, added_axes) = (match relation {
            Relation::Applied {
                functions,
                transposed,
            } => (origin.folded_from.as_slice(), functions, transposed, 0),
            Relation::Same { added_axes, .. } if added_axes > 0 => {
                (origin.names.as_slice(), Vec::new(), false, added_axes)
            }
            Relation::Same { .. } | Relation::Other => continue,
        }) else {
            continue;
        };
        let parameter = parameter.clone();
        let is_repeat = |name: &String| REPEATS.contains(&name.as_str());
        let (repeats, functions): (Vec<String>, _) = functions.into_iter().partition(is_repeat);
        let known = |name: &String| FUNCTIONS.iter().find(|f| f.name == name);
        let Some(chain) = in_order(&functions, &value.name)
            .and_then(|order| order.iter().map(known).collect::<Option<Vec<_>>>())
        else {
            continue;
        };
        let Some(stored) = value.tensor().filter(|_| !graph.is_output(id)).cloned() else {
            continue;
        };
        let single = match repeats.is_empty() {
            true => Some(stored.clone()),
            false => without_repeats(&stored),
        };
        let Some(original) = single.and_then(|t| invert(&t, &chain)) else {
            continue;
        };
        let Some(original) = without_axes(original, added_axes) else {
            continue;
        };
        let is_reshaped = added_axes > 0;
        let is_repeated = !is_reshaped && original.dims != stored.dims;
        if chain.iter().any(|f| f.name == ADD) {
            raised.push(quoted(&parameter));
        }
        let source = match graph.find_value(&parameter) {
            Some(held) if graph.value(held).tensor().is_some() && !transposed => held,
            Some(_) => continue,
            None => {
                let held = graph.add_init(&parameter, original);
                let origin = Origin {
                    names: vec![parameter],
                    transposed,
                    is_parameter: Some(true),
                    ..Origin::default()
                };
                graph.origins.insert(held, origin);
                held
            }
        };
        let before = graph.order().len();
        let mut builder = Builder::new(graph);
        let mut result = source;
        for function in chain {
            result = (function.apply)(&mut builder, result)?;
        }
        let sizes: Vec<i64> = stored.dims.iter().map(|d| *d as i64).collect();
        if is_repeated {
            let shape = builder.ints(&sizes);
            result = builder.op(&ops::shape::EXPAND, &[result, shape])?;
        } else if is_reshaped {
            result = builder.reshape(result, &sizes)?;
        }
        graph.replace_uses(id, result);
        graph.remove_source(id);
        first.extend_from_slice(&graph.order()[before..]);
    }
    if !first.is_empty() {
        let added: BTreeSet<_> = first.iter().copied().collect();
        let rest = graph.order().iter().copied();
        let rest: Vec<_> = rest.filter(|n| !added.contains(n)).collect();
        graph.set_order([first, rest].concat());
    }
    Ok(raised)
}

/// Returns the functions in the order of their application. The initializer is named after the last one, so two have one
/// order; more are not told apart.
fn in_order(functions: &[String], initializer: &str) -> Option<Vec<String>> {
    let is_last = |f: &&String| {
        let rest = initializer.strip_prefix(f.as_str());
        rest.is_some_and(|r| r.is_empty() || r.starts_with('_'))
    };
    match functions {
        [] | [_] => Some(functions.to_vec()),
        [a, b] if a != b => match (is_last(&a), is_last(&b)) {
            (true, false) => Some(vec![b.clone(), a.clone()]),
            (false, true) => Some(vec![a.clone(), b.clone()]),
            _ => None,
        },
        _ => None,
    }
}

/// Returns the tensor without `count` axes of size 1; `None` where it has fewer.
fn without_axes(tensor: Tensor, count: usize) -> Option<Tensor> {
    let mut left = count;
    let mut dims = tensor.dims.clone();
    dims.retain(|d| {
        let goes = *d == 1 && left > 0;
        left -= usize::from(goes);
        !goes
    });
    (left == 0).then_some(Tensor { dims, ..tensor })
}

/// Returns the first slice along the first axis whose slices are all equal; the tensor itself where there is none.
fn without_repeats(tensor: &Tensor) -> Option<Tensor> {
    let bytes = tensor.bytes()?;
    for (axis, length) in tensor.dims.iter().enumerate().filter(|(_, n)| **n > 1) {
        let inner = tensor.dims[axis + 1..].iter().product::<u64>() * tensor.dtype.size_bytes();
        let (inner, length) = (usize::try_from(inner).ok()?, usize::try_from(*length).ok()?);
        let mut slices = bytes.chunks_exact(inner * length);
        if inner > 0 && slices.all(|s| s[inner..] == s[..inner * (length - 1)]) {
            let first = bytes.chunks_exact(inner * length).flat_map(|s| &s[..inner]);
            let mut dims = tensor.dims.clone();
            dims[axis] = 1;
            let first: Vec<u8> = first.copied().collect();
            return Some(Tensor::new(tensor.dtype, dims, first));
        }
    }
    Some(tensor.clone())
}

/// Returns the tensor to which the functions were applied; `None` where rounding has destroyed it.
fn invert(tensor: &Tensor, chain: &[&Function]) -> Option<Tensor> {
    if chain.is_empty() {
        return Some(tensor.clone());
    }
    let rounding = match tensor.dtype.size_bytes() {
        8 => f64::EPSILON,
        4 => f64::from(f32::EPSILON),
        _ => return None,
    };
    let back = |y: f64| chain.iter().rev().fold(y, |y, f| (f.inverse)(y));
    let mut bytes = Vec::new();
    for i in 0..usize::try_from(tensor.elements()).ok()? {
        let y = tensor.get_f64(i)?;
        let x = back(y);
        let (below, above) = (
            back(y - y.abs() * rounding / 2.0),
            back(y + y.abs() * rounding / 2.0),
        );
        let spread = (above - below).abs() / 2.0;
        let is_exact = x.is_finite() && spread <= ROUNDINGS * rounding * x.abs().max(1.0);
        if !is_exact {
            return None;
        }
        bytes.extend_from_slice(Tensor::scalar(tensor.dtype, x).bytes()?);
    }
    Some(Tensor::new(tensor.dtype, tensor.dims.clone(), bytes))
}

/// Returns warnings about parameters that get no gradient of their own, and about those to which a constant was added.
pub fn warnings(graph: &Graph, export: &Export, raised: &[String]) -> Vec<String> {
    let mut folded: Vec<String> = Vec::new();
    let mut held: BTreeSet<&str> = BTreeSet::new();
    for (id, origin) in &graph.origins {
        held.extend(origin.names.iter().map(String::as_str));
        if let [_, ..] = origin.folded_from.as_slice() {
            let sources: Vec<String> = origin.folded_from.iter().map(|p| quoted(p)).collect();
            let initializer = &graph.value(*id).name;
            folded.push(match sources.as_slice() {
                [one] if *one == quoted(initializer) => one.clone(),
                _ => format!(
                    "{} (in {}, which is not trained)",
                    sources.join(" and "),
                    quoted(initializer)
                ),
            });
            held.extend(origin.folded_from.iter().map(String::as_str));
        }
    }
    let (traced, unused) = export.missing(&held);
    folded.extend(traced.iter().map(|p| quoted(p)));
    let mut lines = Vec::new();
    if !folded.is_empty() {
        lines.push(format!(
            "the exporter folded parameters into constants, so these get no gradient of their own: {}; export with \
             optimize=False, or as .pt2 with torch.export.save",
            folded.join(", ")
        ));
    }
    if !raised.is_empty() {
        lines.push(format!(
            "the exporter added a constant to {}, which the file does not hold: it is taken to be 1; export with \
             optimize=False, or as .pt2 with torch.export.save, if it is not",
            shown(raised)
        ));
    }
    let unknown = unknown(graph);
    if !unknown.is_empty() {
        lines.push(format!(
            "the file does not tell from which parameters the exporter computed {}: these are trained in their place; \
             export as .pt2 with torch.export.save to train the parameters",
            shown(&unknown)
        ));
    }
    if !unused.is_empty() {
        let names: Vec<String> = unused.iter().map(|p| quoted(p)).collect();
        lines.push(format!(
            "no node of the file was made with these parameters of the model, because they are tied to others, unused or \
             folded: {}",
            names.join(", ")
        ));
    }
    lines
}

/// Returns the trained initializers of the legacy exporter's folding that have no name.
fn unknown(graph: &Graph) -> Vec<String> {
    let is_typed = graph.values().all(|(_, v)| v.ty.is_some());
    let all = match is_typed {
        true => parameters(graph, &Selection::default()).unwrap_or_default(),
        false => Vec::new(),
    };
    let unknown = all
        .iter()
        .filter(|p| p.trainable && p.name.starts_with(FOLDED) && p.folded_from.is_empty());
    unknown.map(|p| quoted(&p.name)).collect()
}

/// Returns a list with the first of its items.
fn shown(all: &[String]) -> String {
    let first = all
        .iter()
        .take(SHOWN)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match all.len().saturating_sub(SHOWN) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

fn quoted(name: &str) -> String {
    format!("`{name}`")
}
