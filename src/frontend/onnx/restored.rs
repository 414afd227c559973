//! Undoes functions that an exporter applied to parameters ahead of time, and warns about what cannot be undone.
//!
//! `exp(logit_scale)` is stored as its result. [`restore`] inverts the function, stores the parameter under its own name,
//! and adds the function as a node, so that the parameter is trained and not the result. Folded rows of a table or a batch
//! norm that was multiplied into a convolution cannot be inverted: [`warnings`] names them.

use super::exported::{AddedAxes, Export, Relation};
use super::legacy::{FOLDED, is_parameter_name};
use ckpt_passes::Result;
use ckpt_passes::analysis::params::{Selection, is_running_statistic, parameters};
use ckpt_passes::ir::{DType, Graph, Origin, Tensor, Value, ValueId};
use ckpt_passes::ops::{self, Builder, EmitExt};
use std::collections::{BTreeMap, BTreeSet};

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

/// A function of a number and a constant, which the file does not hold. It follows from the parameter, where the file holds that
/// too, and is 1 in `1 - time_mix`.
struct WithConstant {
    /// PyTorch's name.
    name: &'static str,
    value: fn(x: f64, constant: f64) -> f64,
    constant: fn(x: f64, value: f64) -> f64,
    apply: fn(&mut Builder, ValueId, ValueId) -> Result<ValueId>,
}

const WITH_CONSTANT: &[WithConstant] = &[
    WithConstant {
        name: ADD,
        value: |x, c| x + c,
        constant: |x, y| y - x,
        apply: |b, x, c| b.add(x, c),
    },
    WithConstant {
        name: "sub",
        value: |x, c| c - x,
        constant: |x, y| y + x,
        apply: |b, x, c| b.sub(c, x),
    },
    WithConstant {
        name: "sub",
        value: |x, c| x - c,
        constant: |x, y| x - y,
        apply: |b, x, c| b.sub(x, c),
    },
    WithConstant {
        name: "mul",
        value: |x, c| x * c,
        constant: |x, y| y / x,
        apply: |b, x, c| b.mul(x, c),
    },
    WithConstant {
        name: "div",
        value: |x, c| x / c,
        constant: |x, y| x / y,
        apply: |b, x, c| b.div(x, c),
    },
];

impl WithConstant {
    /// Returns the constant with which the function makes `stored` of `parameter`, up to rounding; `None` if there is none.
    fn solve(&self, parameter: &Tensor, stored: &Tensor) -> Option<f64> {
        let count = usize::try_from(stored.elements()).ok()?;
        if parameter.dims != stored.dims || parameter.dtype != stored.dtype {
            return None;
        }
        let at = |i: usize| Some((parameter.get_f64(i)?, stored.get_f64(i)?));
        let largest = |a: &usize, b: &usize| {
            let size = |i: usize| at(i).map_or(0.0, |(x, _)| x.abs());
            size(*a).total_cmp(&size(*b))
        };
        let (x, y) = at((0..count).max_by(largest)?)?;
        let exact = (self.constant)(x, y);
        // A constant that people write has few digits.
        let short = (exact * SHORT).round() / SHORT;
        let rounding = tensor_rounding(stored)?;
        let fits = |c: f64| {
            let agrees = |(x, y): (f64, f64)| {
                let scale = x.abs().max(y.abs()).max(c.abs());
                ((self.value)(x, c) - y).abs() <= rounding * scale
            };
            c.is_finite() && (0..count).all(|i| at(i).is_some_and(agrees))
        };
        [short, exact].into_iter().find(|c| fits(*c))
    }
}

/// Constants are first tried as multiples of one over this.
const SHORT: f64 = 1e4;

/// Returns the relative rounding error of a tensor's type; `None` for types of half precision and integers.
fn tensor_rounding(tensor: &Tensor) -> Option<f64> {
    match tensor.dtype {
        DType::F64 => Some(f64::EPSILON),
        DType::F32 => Some(f64::from(f32::EPSILON)),
        _ => None,
    }
}

/// PyTorch's addition of a constant, which the file no longer holds. The constant is assumed to be 1, as in norms that compute
/// `1 + weight`, and a warning says so. The gradient is right for any constant.
const ADD: &str = "add";

/// PyTorch's ops that repeat a tensor along an axis. A vision model repeats its class token once for each image.
const REPEATS: &[&str] = &["expand", "repeat"];

/// An inverted parameter may differ from the exact one by this many units of rounding, relative to the larger of 1 and its
/// magnitude.
const ROUNDINGS: f64 = 2.0;

/// Most initializers for which a warning lists where they are.
const SHOWN: usize = 6;

/// What [`restore`] had to assume.
#[derive(Default)]
pub struct Assumptions {
    /// Parameters to which a constant was added that the file does not hold.
    raised: Vec<String>,
    /// Parameters of which the file does not tell how many axes of size 1 they have.
    reshaped: Vec<String>,
}

/// Replaces initializers that hold a function of a parameter by the parameter and the function.
///
/// # Errors
/// Those of type inference: our bug.
pub fn restore(graph: &mut Graph, export: &Export) -> Result<Assumptions> {
    let mut assumed = Assumptions::default();
    let folded: Vec<ValueId> = graph.origins.keys().copied().collect();
    let mut first = Vec::new();
    for id in folded {
        let (origin, value) = (&graph.origins[&id], graph.value(id));
        let is_named_column = value.name.starts_with(FOLDED) && !origin.transposed;
        let relation = match is_named_column && !origin.names.is_empty() {
            // The legacy exporter adds axes to the weights of group norms.
            true => Relation::Same {
                transposed: false,
                added_axes: AddedAxes::Viewed,
            },
            false => export.relation(&value.name, value.ty().rank()),
        };
        let ([parameter], functions, transposed, added_axes) = (match relation {
            Relation::Applied {
                functions,
                transposed,
                added_axes,
            } => (
                origin.folded_from.as_slice(),
                functions,
                transposed,
                added_axes,
            ),
            Relation::Same { added_axes, .. } if added_axes != AddedAxes::NONE => {
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
        let held = graph.find_value(&parameter);
        let held = held.filter(|h| graph.value(*h).tensor().is_some() && !transposed);
        if let (Some(held), [name], false) = (held, functions.as_slice(), graph.is_output(id))
            && let Some((function, constant)) = with_constant(graph, name, held, id)
        {
            let before = graph.order().len();
            let mut builder = Builder::new(graph);
            let constant = builder.scalar_like(held, constant);
            let result = (function.apply)(&mut builder, held, constant)?;
            graph.replace_uses(id, result);
            graph.remove_source(id);
            first.extend_from_slice(&graph.order()[before..]);
            continue;
        }
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
        let single_dims = original.dims.clone();
        let Some(original) = without_axes(original, added_axes) else {
            continue;
        };
        let is_reshaped = original.dims != single_dims;
        if chain.is_empty() && original.dims == stored.dims {
            continue;
        }
        let agrees = |h: ValueId| {
            graph
                .value(h)
                .tensor()
                .is_some_and(|t| is_near(t, &original))
        };
        if held.is_some_and(|h| !agrees(h)) {
            continue;
        }
        if chain.iter().any(|f| f.name == ADD) {
            assumed.raised.push(quoted(&parameter));
        }
        let has_unknown_axes = added_axes == AddedAxes::Viewed || !repeats.is_empty();
        if has_unknown_axes && original.dims.len().max(single_dims.len()) > 1 && held.is_none() {
            let shape = original.dims.iter().map(u64::to_string);
            let shape = shape.collect::<Vec<_>>().join(", ");
            assumed
                .reshaped
                .push(format!("{} [{shape}]", quoted(&parameter)));
        }
        let source = match (held, graph.find_value(&parameter)) {
            (Some(held), _) => held,
            (None, Some(_)) => continue,
            (None, None) => {
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
        let sizes = |dims: &[u64]| dims.iter().map(|d| *d as i64).collect::<Vec<i64>>();
        if is_reshaped {
            result = builder.reshape(result, &sizes(&single_dims))?;
        }
        if single_dims != stored.dims {
            let shape = builder.ints(&sizes(&stored.dims));
            result = builder.op(&ops::shape::EXPAND, &[result, shape])?;
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
    Ok(assumed)
}

/// Returns the function of that name and the constant with which it makes an initializer of a parameter that the file holds.
fn with_constant(
    graph: &Graph,
    name: &str,
    held: ValueId,
    id: ValueId,
) -> Option<(&'static WithConstant, f64)> {
    let (x, y) = (graph.value(held).tensor()?, graph.value(id).tensor()?);
    let mut of = WITH_CONSTANT.iter().filter(|f| f.name == name);
    of.find_map(|f| Some((f, f.solve(x, y)?)))
}

/// Returns true if two tensors of one shape are equal up to the rounding of an inversion.
fn is_near(a: &Tensor, b: &Tensor) -> bool {
    let rounding = tensor_rounding(a).unwrap_or(0.0);
    let near = |i: usize| match (a.get_f64(i), b.get_f64(i)) {
        (Some(x), Some(y)) => (x - y).abs() <= 2.0 * ROUNDINGS * rounding * x.abs().max(1.0),
        _ => false,
    };
    let count = usize::try_from(a.elements()).unwrap_or(0);
    a.dtype == b.dtype && a.dims == b.dims && (0..count).all(near)
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

/// Returns the tensor without the axes of size 1 that were added; `None` where it has fewer.
fn without_axes(tensor: Tensor, added: AddedAxes) -> Option<Tensor> {
    let mut dims = tensor.dims.clone();
    let mut left = match added {
        AddedAxes::Count(count) => count,
        AddedAxes::Viewed if dims.iter().filter(|d| **d != 1).count() == 1 => dims.len() - 1,
        AddedAxes::Viewed => 0,
    };
    dims.retain(|d| {
        let goes = *d == 1 && left > 0;
        left -= usize::from(goes);
        !goes
    });
    (left == 0).then_some(Tensor { dims, ..tensor })
}

/// Returns the tensor without repeats: its first slice along each axis whose slices are all equal. Of a tensor of equal numbers
/// only the first such axis is known to be repeated, for a parameter may begin with equal numbers.
fn without_repeats(tensor: &Tensor) -> Option<Tensor> {
    let size = usize::try_from(tensor.dtype.size_bytes()).ok()?;
    let bytes = tensor.bytes()?;
    let is_constant = bytes.get(size..) == bytes.get(..bytes.len().saturating_sub(size));
    let mut single = tensor.clone();
    for axis in 0..tensor.dims.len() {
        if let Some(slice) = first_of_equal(&single, axis) {
            single = slice;
            if is_constant {
                break;
            }
        }
    }
    Some(single)
}

/// Returns the first slice along an axis, if there are several and all are equal.
fn first_of_equal(tensor: &Tensor, axis: usize) -> Option<Tensor> {
    let bytes = tensor.bytes()?;
    let inner = tensor.dims[axis + 1..].iter().product::<u64>() * tensor.dtype.size_bytes();
    let (inner, length) = (
        usize::try_from(inner).ok()?,
        usize::try_from(tensor.dims[axis]).ok()?,
    );
    if inner == 0 || length < 2 {
        return None;
    }
    let slices = || bytes.chunks_exact(inner * length);
    slices()
        .all(|s| s[inner..] == s[..inner * (length - 1)])
        .then(|| {
            let first: Vec<u8> = slices().flat_map(|s| &s[..inner]).copied().collect();
            let mut dims = tensor.dims.clone();
            dims[axis] = 1;
            Tensor::new(tensor.dtype, dims, first)
        })
}

/// Returns the tensor to which the functions were applied; `None` where rounding has destroyed it.
fn invert(tensor: &Tensor, chain: &[&Function]) -> Option<Tensor> {
    if chain.is_empty() {
        return Some(tensor.clone());
    }
    let rounding = tensor_rounding(tensor)?;
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

/// Returns warnings about parameters that get no gradient of their own, and about what was assumed.
pub fn warnings(graph: &Graph, export: &Export, assumed: &Assumptions) -> Vec<String> {
    let mut holders: BTreeMap<(Vec<String>, bool), Vec<String>> = BTreeMap::new();
    let mut held: BTreeSet<&str> = BTreeSet::new();
    for (id, origin) in &graph.origins {
        held.extend(origin.names.iter().map(String::as_str));
        held.extend(origin.folded_from.iter().map(String::as_str));
        if !origin.folded_from.is_empty() {
            let key = (origin.folded_from.clone(), origin.frozen);
            let all = holders.entry(key).or_default();
            all.push(quoted(&graph.value(*id).name));
        }
    }
    let mut folded: Vec<String> = Vec::new();
    for ((sources, is_frozen), initializers) in &holders {
        let sources: Vec<String> = sources.iter().map(|p| quoted(p)).collect();
        if holders.len() > SHOWN {
            folded.extend(sources);
            continue;
        }
        folded.push(format!(
            "{} (in {}, {} {})",
            sources.join(" and "),
            initializers.join(" and "),
            if initializers.len() > 1 {
                "which are"
            } else {
                "which is"
            },
            if *is_frozen { "not trained" } else { "trained" },
        ));
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
    if !assumed.reshaped.is_empty() {
        lines.push(format!(
            "the file does not tell the shapes of parameters that the exporter repeated or reshaped; axes of size 1 may be \
             other than in {}",
            assumed.reshaped.join(", ")
        ));
    }
    if !assumed.raised.is_empty() {
        lines.push(format!(
            "the exporter added a constant to {}, which the file does not hold: it is taken to be 1; export with \
             optimize=False, or as .pt2 with torch.export.save, if it is not",
            assumed.raised.join(", ")
        ));
    }
    let (unknown, left) = unnamed(graph);
    if !unknown.is_empty() {
        lines.push(format!(
            "the file does not tell from which parameters the exporter computed {}: these are trained in their place; \
             export as .pt2 with torch.export.save to train the parameters",
            unknown.join(", ")
        ));
    }
    if !left.is_empty() {
        lines.push(format!(
            "the file does not tell whether constants are parameters, and these are not trained: {}; export as .pt2 with \
             torch.export.save if one ought to be",
            left.join(", ")
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

/// Returns what the legacy exporter folded without a name that is trained, and what may be a parameter and is not trained.
fn unnamed(graph: &Graph) -> (Vec<String>, Vec<String>) {
    let is_typed = graph.values().all(|(_, v)| v.ty.is_some());
    let is_legacy = graph.nodes().any(|(_, n)| n.name.starts_with('/'));
    if !is_typed || !is_legacy {
        return (Vec::new(), Vec::new());
    }
    let all = parameters(graph, &Selection::default()).unwrap_or_default();
    let shown = |id: ValueId| {
        let name = quoted(&graph.value(id).name);
        match module_of(graph, id) {
            Some(module) => format!("{name} (module {})", quoted(&module)),
            None => name,
        }
    };
    let trained = all
        .iter()
        .filter(|p| p.trainable && p.name.starts_with(FOLDED) && p.folded_from.is_empty());
    let listed: BTreeSet<ValueId> = all.iter().map(|p| p.value).collect();
    let left = graph.inits().filter(|(id, value)| {
        let is_told = listed.contains(id) || graph.origins.contains_key(id);
        let is_named = value.name.starts_with(FOLDED) || is_parameter_name(&value.name);
        let is_read = !value.uses().is_empty() || graph.is_output(*id);
        let is_float = value.ty().dtype.is_float();
        !is_told
            && is_named
            && is_read
            && is_float
            && !is_running_statistic(&value.name)
            && !is_mask(value)
    });
    (
        trained.map(|p| shown(p.value)).collect(),
        left.map(|(id, _)| shown(id)).collect(),
    )
}

/// Returns true for a tensor of at most two different numbers, such as 0 and the least one.
fn is_mask(value: &Value) -> bool {
    let Some(tensor) = value.tensor().filter(|t| t.elements() > 1) else {
        return false;
    };
    let mut seen: Vec<f64> = Vec::new();
    (0..usize::try_from(tensor.elements()).unwrap_or(0)).all(|i| {
        let number = tensor.get_f64(i).unwrap_or(f64::NAN);
        if !seen.contains(&number) {
            seen.push(number);
        }
        seen.len() <= 2
    })
}

/// Returns the module path in the name of a node that reads a value, as the legacy exporter writes it.
fn module_of(graph: &Graph, value: ValueId) -> Option<String> {
    let mut uses = graph.value(value).uses().iter();
    uses.find_map(|reader| {
        let path = graph.node(reader.node).name.strip_prefix('/')?;
        let (scope, _) = path.rsplit_once('/')?;
        Some(scope.replace('/', "."))
    })
}

fn quoted(name: &str) -> String {
    format!("`{name}`")
}
