//! Numbers for symbolic sizes, which planning and memory accounting need.
//!
//! A [`Binding`] gives every named size a number: the user's, or a default by the kind of the dimension, which is
//! reported as an assumption. [`Sizes`] evaluates the type of every value under a binding. The graph stays symbolic.
//!
//! Sizes that only the data decides (`?nonzero.1`) take the user's number, else a proven upper bound from the op that
//! made them. Without either, the request is refused. Every value whose size rests on such a bound is marked, so that a
//! summary can say that its figures are upper bounds.

use crate::analysis::baked_sizes::baked_sizes;
use crate::analysis::index_bounds::{IndexBound, index_bounds};
use crate::analysis::ranges::{self, Ranges};
use crate::error::{Error, Result};
use crate::ir::op::{DataSizes, Domain, Sized};
use crate::ir::typing::{Contents, type_node};
use crate::ir::{Atom, DType, Dim, Graph, NodeId, Phase, SecondaryMap, ValueId};
use crate::near::nearest;
use crate::ops::conv::CONV;
use std::collections::{BTreeMap, BTreeSet};

/// The kind of a named size, which decides its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DimKind {
    /// A number of samples.
    Batch,
    /// A length, such as that of a sequence.
    Sequence,
}

impl DimKind {
    /// Returns the default of a size of this kind: a batch of 1, a sequence of 128.
    pub fn default_size(self) -> i64 {
        match self {
            DimKind::Batch => 1,
            DimKind::Sequence => 128,
        }
    }
}

/// A number for every named size of a graph's inputs.
#[derive(Clone, Debug, Default)]
pub struct Binding {
    sizes: BTreeMap<String, i64>,
    assumed: BTreeMap<String, DimKind>,
}

/// Returns the named sizes of a graph and their kinds.
///
/// A name with "batch" in it is of the batch kind and one with "seq", "len" or "pos" of the sequence kind; any other is
/// of the batch kind if it is the first axis of an input of two or more axes, or appears on first axes only.
pub fn dim_kinds(graph: &Graph) -> BTreeMap<String, DimKind> {
    // For each name: it is the first axis of an input of two or more axes; it is another axis.
    let mut names: BTreeMap<String, (bool, bool)> = BTreeMap::new();
    for ty in graph
        .inputs()
        .iter()
        .filter_map(|v| graph.value(*v).ty.as_ref())
    {
        for (axis, dim) in ty.dims.iter().enumerate() {
            dim.for_each_leaf(&mut |atom| {
                if let Atom::Sym(name) = atom {
                    let (leads, inner) = names.entry(name.to_string()).or_default();
                    *leads |= axis == 0 && ty.rank() > 1;
                    *inner |= axis > 0;
                }
            });
        }
    }
    let kind = |(name, (leads, inner)): (String, (bool, bool))| {
        let lower = name.to_lowercase();
        let is_sequence = ["seq", "len", "pos"].iter().any(|w| lower.contains(w));
        let is_batch = lower.contains("batch") || !is_sequence && (leads || !inner);
        let kind = if is_batch {
            DimKind::Batch
        } else {
            DimKind::Sequence
        };
        (name, kind)
    };
    names.into_iter().map(kind).collect()
}

impl Binding {
    /// Returns the given sizes, and defaults for the named sizes that are not given.
    ///
    /// Defaults are as large as their kind says, moved into their range, and at most as large as the tables of the model allow
    /// ([`index_bounds`]). Where the model was traced at fixed sizes ([`baked_sizes`]), defaults fit these.
    ///
    /// # Errors
    /// A size below 1 or outside its range ([`ranges`]); a name that no input has (data-dependent sizes are written
    /// `?name`); sizes at which the model reads beyond a table, or at which a traced model does not run.
    pub fn new(graph: &Graph, given: &[(String, i64)]) -> Result<Binding> {
        Binding::within(graph, given, index_bounds)
    }

    /// As [`Binding::new`], for a run whose data is known. Whether that reads beyond a table is left to the run, where
    /// sizes alone do not tell.
    ///
    /// # Errors
    /// As [`Binding::new`].
    pub fn of_run(graph: &Graph, given: &[(String, i64)]) -> Result<Binding> {
        Binding::within(graph, given, |graph| {
            let mut bounds = index_bounds(graph)?;
            bounds.retain(|bound| bound.is_certain);
            Ok(bounds)
        })
    }

    fn within(
        graph: &Graph,
        given: &[(String, i64)],
        bounds: impl Fn(&Graph) -> Result<Vec<IndexBound>>,
    ) -> Result<Binding> {
        let kinds = dim_kinds(graph);
        let ranges = ranges::of(graph)?;
        let mut binding = Binding::default();
        for (name, size) in given {
            let is_data = name.starts_with('?');
            if !is_data && !kinds.contains_key(name) {
                return Err(unknown(graph, name, &kinds));
            }
            let least = if is_data { 0 } else { 1 };
            if *size < least {
                let what = format!("`{name}` cannot be {size}");
                return Err(Error::usage("dim", what).expected(format!("{least} or more")));
            }
            binding.sizes.insert(name.clone(), *size);
        }
        for (name, kind) in kinds {
            if !binding.sizes.contains_key(&name) {
                let (least, most) = ranges.get(&name).copied().unwrap_or((1, i64::MAX));
                let size = kind.default_size().min(most).max(least);
                binding.sizes.insert(name.clone(), size);
                binding.assumed.insert(name, kind);
            }
        }
        if graph.phase >= Phase::Typed {
            let bounds = bounds(graph)?;
            for bound in &bounds {
                binding.shrink_to(graph, bound)?;
            }
            binding.fit_baked_sizes(graph, &bounds)?;
            binding.grow(graph, &bounds, &ranges);
        }
        for (name, size) in &binding.sizes {
            if let Some((least, most)) = ranges.get(name)
                && !(least..=most).contains(&size)
            {
                return Err(ranges::outside(name, (*least, *most), *size));
            }
        }
        Ok(binding)
    }

    /// Makes assumed sequence sizes as small as a bound asks.
    ///
    /// # Errors
    /// The given sizes exceed the bound.
    fn shrink_to(&mut self, graph: &Graph, bound: &IndexBound) -> Result<()> {
        let Some(index) = bound.exceeded(&|name| self.get(name)) else {
            return Ok(());
        };
        let names = bound.names();
        let assumed: Vec<&String> = names
            .iter()
            .filter(|n| self.assumed.get(*n) == Some(&DimKind::Sequence))
            .collect();
        let fits = |free: &[&String], size: i64| {
            let at = |name: &str| match free.iter().any(|n| *n == name) {
                true => Some(size.min(self.sizes[name])),
                false => self.get(name),
            };
            bound.exceeded(&at).is_none()
        };
        let largest = assumed.iter().map(|n| self.sizes[*n]).max().unwrap_or(0);
        if let Some(size) = (1..=largest).rev().find(|size| fits(&assumed, *size)) {
            for name in assumed {
                let known = self.sizes[name];
                self.sizes.insert(name.clone(), known.min(size));
            }
            return Ok(());
        }
        let given: Vec<String> = names
            .iter()
            .map(|n| format!("{n}={}", self.sizes[n]))
            .collect();
        let error = Error::usage(
            "dim",
            format!(
                "the model looks up {}, and would read row {index} of it at {}",
                bound.describe(graph),
                given.join(", ")
            ),
        )
        .at(graph.describe(bound.node));
        let all: Vec<&String> = names.iter().collect();
        let most = names.iter().map(|n| self.sizes[n]).max().unwrap_or(0);
        let mut works = (0, most);
        // Bisection is right where a larger size reads further; elsewhere no single size helps.
        while works.1 - works.0 > 1 {
            let middle = works.0 + (works.1 - works.0) / 2;
            match fits(&all, middle) {
                true => works.0 = middle,
                false => works.1 = middle,
            }
        }
        let advice: Vec<String> = all
            .iter()
            .map(|n| format!("--dim {n}={}", works.0.min(self.sizes[*n])))
            .collect();
        Err(match works.0 {
            0 => error.help("choose smaller sizes with --dim"),
            _ => error.help(format!("{} at most", advice.join(" "))),
        })
    }

    /// Doubles assumed sequence sizes as long as a tensor would have a negative size, or a convolution no result: audio
    /// models shorten their input many times.
    fn grow(&mut self, graph: &Graph, bounds: &[IndexBound], ranges: &Ranges) {
        let is_sequence =
            |(name, kind): (&String, &DimKind)| (*kind == DimKind::Sequence).then(|| name.clone());
        let names: Vec<String> = self.assumed.iter().filter_map(is_sequence).collect();
        let mut sizes = self.sizes.clone();
        while !names.is_empty() && self.sizes[&names[0]] < MAX_ASSUMED {
            let at = |name: &str| sizes.get(name).copied();
            let fits_range = |name: &String| {
                let (least, most) = ranges.get(name).copied().unwrap_or((1, i64::MAX));
                (least..=most).contains(&sizes[name])
            };
            if !names.iter().all(fits_range) || bounds.iter().any(|b| b.exceeded(&at).is_some()) {
                return;
            }
            if !is_too_short(graph, &at) {
                self.sizes = sizes;
                return;
            }
            for name in &names {
                sizes.insert(name.clone(), sizes[name].saturating_mul(2));
            }
            if sizes[&names[0]] > MAX_ASSUMED {
                return;
            }
        }
    }

    /// Changes assumed sizes to ones at which a traced model runs: the smallest batch, then the largest sequence.
    ///
    /// # Errors
    /// No assumed sizes fit the trace.
    fn fit_baked_sizes(&mut self, graph: &Graph, bounds: &[IndexBound]) -> Result<()> {
        let baked = baked_sizes(graph);
        let broken = |sizes: &BTreeMap<String, i64>| {
            let at = |name: &str| sizes.get(name).copied();
            baked.iter().find_map(|b| Some((b, b.broken(&at)?)))
        };
        let Some((first, (found, wanted))) = broken(&self.sizes) else {
            return Ok(());
        };
        let of = |kind: DimKind| -> Vec<&String> {
            let assumed = self.assumed.iter().filter(|(_, k)| **k == kind);
            assumed.map(|(name, _)| name).collect()
        };
        let (batch, sequence) = (of(DimKind::Batch), of(DimKind::Sequence));
        let range = |names: &[&String]| match names.is_empty() {
            true => 1,
            false => DimKind::Sequence.default_size(),
        };
        for b in 1..=range(&batch) {
            for s in (1..=range(&sequence)).rev() {
                let mut sizes = self.sizes.clone();
                sizes.extend(batch.iter().map(|n| (n.to_string(), b)));
                sizes.extend(sequence.iter().map(|n| (n.to_string(), s)));
                let at = |name: &str| sizes.get(name).copied();
                let is_beyond = bounds.iter().any(|bound| bound.exceeded(&at).is_some());
                if !is_beyond && broken(&sizes).is_none() {
                    self.sizes = sizes;
                    return Ok(());
                }
            }
        }
        Err(Error::usage(
            "dim",
            "the model was traced at fixed sizes, and does not run at these".to_string(),
        )
        .expected(format!("{wanted} elements ({})", first.result))
        .found(format!("{found} elements ({})", first.operand))
        .at(graph.describe(first.node))
        .help("give the sizes it was exported with: --dim NAME=N"))
    }

    /// Returns the number of a named size.
    pub fn get(&self, name: &str) -> Option<i64> {
        self.sizes.get(name).copied()
    }

    /// Returns all sizes, by name; names of data-dependent sizes begin with `?`.
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        self.sizes.iter().map(|(name, size)| (name.as_str(), *size))
    }

    /// Returns the sizes that nobody gave: name, number, and the kind that decided it.
    pub fn assumed(&self) -> impl Iterator<Item = (&str, i64, DimKind)> {
        self.assumed
            .iter()
            .map(|(name, kind)| (name.as_str(), self.sizes[name], *kind))
    }
}

/// Returns the error for a name that no size has, with how to give a fixed size that name.
fn unknown(graph: &Graph, name: &str, kinds: &BTreeMap<String, DimKind>) -> Box<Error> {
    let known: Vec<&str> = kinds.keys().map(String::as_str).collect();
    let what = format!("no input has a dimension named `{name}`");
    let error = Error::usage("dim", what).expected(match known.is_empty() {
        true => "no name: all sizes of this model are fixed".to_string(),
        false => format!("one of {}", known.join(", ")),
    });
    if let Some(near) = nearest(name, known, 1).first() {
        return error.help(format!("did you mean {near}?"));
    }
    let export = "export the model with dynamic sizes (dynamic_shapes of torch.export and torch.onnx.export)";
    let mut types = graph.inputs().iter().filter_map(|v| {
        let value = graph.value(*v);
        Some((value.name.as_str(), value.ty.as_ref()?))
    });
    let fixed = types.find(|(_, ty)| ty.dims.first().is_some_and(|dim| dim.as_const().is_some()));
    match fixed {
        Some((input, ty)) => {
            let rest: String = ty.dims[1..].iter().map(|dim| format!(",{dim}")).collect();
            let input = format!("--input '{input}:{}[{name}{rest}]'", ty.dtype);
            error.help(format!(
                "name the size that is to vary, such as {input}; where nodes fix it too, {export}"
            ))
        }
        None if kinds.is_empty() => error.help(export),
        None => error,
    }
}

/// The largest size that is assumed for a sequence.
const MAX_ASSUMED: i64 = 1 << 17;

/// Returns whether a tensor would have a negative size at these sizes, or a convolution an empty result.
fn is_too_short(graph: &Graph, at: &dyn Fn(&str) -> Option<i64>) -> bool {
    let is_below = |value: ValueId, least: i64| {
        let ty = graph.value(value).ty.as_ref();
        ty.is_some_and(|ty| {
            ty.dims
                .iter()
                .any(|d| d.eval(at).is_some_and(|n| n < least))
        })
    };
    graph.order().iter().any(|id| {
        let node = graph.node(*id);
        let least = i64::from(node.op == &CONV);
        node.outs.iter().any(|v| is_below(*v, least))
    })
}

/// Types of all values as numbers.
#[derive(Clone, Debug)]
pub struct Sizes {
    table: SecondaryMap<ValueId, Option<Sized>>,
    /// Data-dependent sizes that are bounded, not given: name and upper bound.
    pub bounded: BTreeMap<String, i64>,
}

impl Sizes {
    /// Evaluates every value of a typed graph.
    ///
    /// # Errors
    /// A size without a number: data-dependent and unbounded, an overflow, a division by zero, a negative.
    pub fn new(graph: &Graph, binding: &Binding) -> Result<Sizes> {
        let mut sizes = Sizes {
            table: SecondaryMap::new(graph.value_bound(), None),
            bounded: BTreeMap::new(),
        };
        let mut contents = Contents::of(graph);
        let inits = graph.inits().map(|(value, _)| value);
        for value in graph.inputs().iter().copied().chain(inits) {
            sizes.evaluate(graph, value, binding, &contents)?;
        }
        for node in graph.order() {
            let outs = &graph.node(*node).outs;
            if graph.node(*node).op.domain != Domain::Opaque {
                let typed = type_node(graph, *node, &contents)?;
                for (value, (_, ints)) in outs.iter().zip(typed) {
                    contents.set(*value, ints);
                }
            }
            sizes.bound_data(graph, *node, binding);
            for value in outs {
                sizes
                    .evaluate(graph, *value, binding, &contents)
                    .map_err(|e| e.at(graph.describe(*node)))?;
            }
        }
        Ok(sizes)
    }

    /// Records the upper bounds of the data-dependent sizes that `node` introduces, from its op's row.
    fn bound_data(&mut self, graph: &Graph, node: NodeId, binding: &Binding) {
        let n = graph.node(node);
        let Some(x) = n.operand(0) else { return };
        let Some(x) = &self.table[x] else { return };
        let limit = match n.op.data_sizes {
            DataSizes::Unbounded => return,
            DataSizes::Elements => x.elements() as i64,
            DataSizes::LongestAxis => x.dims.iter().copied().max().unwrap_or(0),
        };
        let types = n.outs.iter().filter_map(|v| graph.value(*v).ty.as_ref());
        for dim in types.flat_map(|ty| &ty.dims) {
            dim.for_each_leaf(&mut |atom| {
                if let Atom::Data(name) = atom
                    && binding.get(&format!("?{name}")).is_none()
                {
                    self.bounded.entry(name.to_string()).or_insert(limit);
                }
            });
        }
    }

    fn size_of(&self, name: &str, binding: &Binding) -> Option<i64> {
        binding
            .get(name)
            .or_else(|| binding.get(&format!("?{name}")))
            .or_else(|| self.bounded.get(name).copied())
    }

    fn number(&self, dim: &Dim, binding: &Binding) -> Option<i64> {
        dim.eval(&|name| self.size_of(name, binding))
    }

    fn evaluate(
        &mut self,
        graph: &Graph,
        value: ValueId,
        binding: &Binding,
        contents: &Contents,
    ) -> Result<()> {
        let v = graph.value(value);
        let Some(ty) = &v.ty else {
            return Err(Error::bug("sizes", format!("`{}` has no type", v.name)));
        };
        let mut dims = Vec::with_capacity(ty.rank());
        for dim in &ty.dims {
            match self.number(dim, binding) {
                Some(n) if n >= 0 => dims.push(n),
                Some(n) => {
                    let name = &v.name;
                    let what = format!("`{name}` would have a size of {n} ({dim}) at these sizes");
                    return Err(Error::model("shape", what)
                        .help("these sizes do not make a valid run; choose others with --dim"));
                }
                None => return Err(self.no_number(&v.name, dim, binding)),
            }
        }
        let size = ty.dtype.size_bytes() as i64;
        let bytes = dims
            .iter()
            .chain([&size])
            .try_fold(1i64, |n, d| n.checked_mul(*d));
        if bytes.is_none() {
            let what = format!("`{}` would have more bytes than 64 bits can count", v.name);
            return Err(Error::usage("dim", what).found(format!("{}{dims:?}", ty.dtype)));
        }
        let mut sized = Sized::contiguous(ty.dtype, dims);
        sized.ints = contents
            .get(value)
            .and_then(|ints| ints.iter().map(|d| self.number(d, binding)).collect());
        self.table[value] = Some(sized);
        Ok(())
    }

    fn no_number(&self, value: &str, dim: &Dim, binding: &Binding) -> Box<Error> {
        let mut missing = BTreeSet::new();
        dim.for_each_leaf(&mut |atom| {
            if let Atom::Sym(name) | Atom::Data(name) = atom
                && self.size_of(name, binding).is_none()
            {
                missing.insert(match atom {
                    Atom::Data(_) => format!("?{name}"),
                    _ => name.to_string(),
                });
            }
        });
        let what = format!("the size {dim} of `{value}` has no number");
        let e = Error::model("shape", what);
        match missing.first() {
            Some(name) => e
                .found(format!("no bound is known for {name}"))
                .help(format!("give the largest it can be: --dim '{name}=N'")),
            None => e.found(
                "the arithmetic overflows, divides by zero or does not broadcast at these sizes",
            ),
        }
    }

    /// Returns type, row-major strides and known small contents of a value.
    ///
    /// # Panics
    /// If the value was added after the table was made: our bug.
    pub fn of(&self, value: ValueId) -> &Sized {
        self.table[value]
            .as_ref()
            .unwrap_or_else(|| panic!("{value:?} has no sizes: the table is older than the graph"))
    }

    /// Returns the dimensions of a value.
    pub fn dims(&self, value: ValueId) -> &[i64] {
        &self.of(value).dims
    }

    /// Returns the element type of a value.
    pub fn dtype(&self, value: ValueId) -> DType {
        self.of(value).dtype
    }

    /// Returns whether data decides some sizes, which are taken at their upper bounds. Memory is then an upper bound too.
    pub fn is_bound(&self) -> bool {
        !self.bounded.is_empty()
    }

    /// Returns the bytes of the value, were it row-major and alone.
    pub fn bytes(&self, value: ValueId) -> u64 {
        self.of(value).bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Ty;
    use crate::ops::{Builder, EmitExt};

    fn graph() -> Graph {
        let mut g = Graph::new("g");
        let f = |dims: &[&str]| {
            Ty::new(
                DType::F32,
                dims.iter().map(|d| Dim::symbol(d)).collect::<Vec<_>>(),
            )
        };
        let x = g.add_input("x", Some(f(&["b", "s"])));
        let y = g.add_input("y", Some(f(&["s"])));
        let mut b = Builder::new(&mut g);
        let z = b.add(x, y).unwrap();
        let shape = b.shape(z).unwrap();
        g.set_outputs(vec![z, shape]);
        g
    }

    #[test]
    fn defaults_grow_until_a_convolution_has_a_result() {
        let text = "graph @g imported (%x: f32[batch, 1, seq], %w: f32[1, 1, 300]) -> (%y) {
  %y = Conv %x, %w {strides=[100]}
}
";
        let mut graph = crate::text::parse(text).unwrap();
        crate::transform::infer::infer(&mut graph).unwrap();
        let at = |given: &[(String, i64)]| Binding::new(&graph, given).unwrap().get("seq");
        assert_eq!(at(&[]), Some(512));
        assert_eq!(at(&[("seq".into(), 128)]), Some(128));
    }

    #[test]
    fn defaults_go_by_kind_and_are_reported() {
        let g = graph();
        let binding = Binding::new(&g, &[]).unwrap();
        assert_eq!(
            binding.assumed().collect::<Vec<_>>(),
            vec![("b", 1, DimKind::Batch), ("s", 128, DimKind::Sequence)]
        );
        let given = Binding::new(&g, &[("b".into(), 4), ("s".into(), 7)]).unwrap();
        assert_eq!(given.assumed().count(), 0);
        let sizes = Sizes::new(&g, &given).unwrap();
        let z = g.outputs()[0];
        assert_eq!(sizes.dims(z), [4, 7]);
        assert_eq!(sizes.bytes(z), 4 * 7 * 4);
        assert_eq!(sizes.of(g.outputs()[1]).ints, Some(vec![4, 7]));
    }

    #[test]
    fn bad_bindings_are_refused() {
        let g = graph();
        let unknown = Binding::new(&g, &[("seq".into(), 4)]).unwrap_err();
        assert!(unknown.to_string().contains("one of b, s"), "{unknown}");
        assert_eq!(unknown.exit_code(), 2);
        assert!(Binding::new(&g, &[("b".into(), 0)]).is_err());
        let huge = Binding::new(&g, &[("b".into(), i64::MAX / 4), ("s".into(), 9)]).unwrap();
        assert_eq!(Sizes::new(&g, &huge).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn a_size_that_only_data_decides_must_be_given() {
        let mut g = Graph::new("g");
        let x = g.add_input("x", Some(Ty::new(DType::F32, [Dim::data("n.0")])));
        let mut b = Builder::new(&mut g);
        let y = b.neg(x).unwrap();
        g.set_outputs(vec![y]);
        let none = Binding::new(&g, &[]).unwrap();
        let e = Sizes::new(&g, &none).unwrap_err();
        assert!(e.to_string().contains("--dim '?n.0=N'"), "{e}");
        let given = Binding::new(&g, &[("?n.0".into(), 5)]).unwrap();
        assert_eq!(Sizes::new(&g, &given).unwrap().dims(y), [5]);
    }
}
